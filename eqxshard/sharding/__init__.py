"""Where arrays live: meshes, the rules that split arrays over them, and placing arrays.

This room knows PyTrees, devices, type annotations and the weights of a batch's examples,
and nothing of training. Of the other rooms, it may use `distributed` only.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
