"""Look before running: the decisions of a rule, the lint of steps, pictures of arrays.

This room may import `training` and the rooms below it, and `pages`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
