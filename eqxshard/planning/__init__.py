"""What a run will need before there is hardware: memory, communication, time.

A step is compiled for devices that are not there, in a process of its own, and read. May
use everything up to `training`, `inspect`, `debug` and `pages`.
"""
