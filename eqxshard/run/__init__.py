"""Everything around training in a script: options, devices, a run folder, and `train`.

The pieces can be used one by one. This room may import every other room; none imports it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
