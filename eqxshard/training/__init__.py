"""Training states and compiled steps: what one update computes, and how it is compiled.

May use `sharding`, `transforms` and `compiled`; knows nothing of loaders, loops, files or
scripts.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
