"""Crash dumps of failed steps, and replay, which finds the cause.

May use `sharding`, `training` and `checkpoint`.
"""
