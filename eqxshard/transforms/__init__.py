"""Function transforms for PyTrees of anything: `filter_jit` and `filter_shard_map`.

Arrays are traced or split; everything else is static. This room may use `sharding` and
`distributed`.
"""
