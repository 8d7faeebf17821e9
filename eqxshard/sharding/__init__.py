"""Where arrays live: meshes, the rules that split arrays over them, and placing arrays.

Knows PyTrees, devices and type annotations; knows nothing of training. May use
`eqxshard.distributed` only.
"""
