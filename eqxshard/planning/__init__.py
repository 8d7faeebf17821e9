"""What a run will need before there is hardware: memory, communication, time.

A step is compiled for devices that are not there, in a process of its own, and read. May
use everything up to `training`, `inspect`, `debug` and `pages`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
