"""Sources of examples, and the loader that makes sharded batches of them.

This room may use `sharding`, and of `training` the batches that a step gathers for itself;
it knows nothing of models or steps.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
