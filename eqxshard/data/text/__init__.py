"""Text: bytes, token files, and sources of examples for language models.

This room may use `data`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
