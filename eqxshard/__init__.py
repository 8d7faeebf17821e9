"""Sharding-first training for Equinox.

Plain Equinox PyTrees, placed on a device mesh once, trained by one donated, compiled
step. A mesh and a rule say where arrays live; computation follows the data.
"""

import lazy_loader

# The names are those of `__init__.pyi`. Each is imported when first used, so a program
# only waits for the rooms that it needs.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
