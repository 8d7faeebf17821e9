"""Plan a run before there is hardware: its memory, communication and time.

A process of its own compiles the step for devices that are not there, and reads what was
compiled. This room may import `pages`, `inspect`, `training` and the rooms below them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
