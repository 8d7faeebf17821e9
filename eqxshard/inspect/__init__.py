"""Inspect a run: the decision of a rule for each array.

May use `sharding`, `transforms` and `training`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
