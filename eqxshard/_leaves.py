"""The arrays of a PyTree by their paths, and how Orbax writes and reads them."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from .sharding import is_array, leaf_path

#: Large arrays are read in parts, so that a shard does not cost a whole array.
_CHUNK_BYTES = 2**24


def write(folder: Any, leaves: dict[str, Any]) -> Any:
    """Begin to write arrays; returns once they are copied from their devices."""
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_is_news)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        return ocp.save_async(
            folder,
            {
                path: jax.random.key_data(leaf) if _is_key(leaf) else leaf
                for path, leaf in leaves.items()
                # Orbax refuses them, and there is nothing to save.
                if leaf.size
            },
        )


def _is_news(record: logging.LogRecord) -> bool:
    # Each of Orbax's threads logs what it raises, with a traceback; we say it, too.
    return "_SignalingThread.run() raised" not in record.getMessage()


def read(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Read arrays by their paths, each to where its leaf is or is to be."""
    from orbax.checkpoint import v1 as ocp

    targets = {path: _target(leaf) for path, leaf in wanted.items()}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    full = {path: target for path, target in targets.items() if 0 not in target.shape}
    # Of what is read, besides what was read: no more than the largest part.
    largest = max((_shard_bytes(target) for target in full.values()), default=0)
    context.memory.read_concurrent_bytes = largest + 2**20
    with context:
        arrays = ocp.load(folder, full) if full else {}
    for path, leaf in wanted.items():
        if path not in full:
            empty = jnp.zeros(targets[path].shape, targets[path].dtype)
            arrays[path] = jax.device_put(empty, targets[path].sharding)
        if _is_key(leaf):
            keys = jax.random.wrap_key_data(arrays[path], impl=leaf.dtype)
            arrays[path] = jax.device_put(keys, targets[path].sharding)
    return arrays


def paths_of(tree: PyTree, root: str = "") -> list[str]:
    """The paths of a PyTree's arrays, in the order of `split`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [leaf_path(path, root) for path, leaf in leaves if is_array(leaf)]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(
            f"two arrays have the path {twice[0]}; use names without dots in dicts."
        )
    return paths


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(leaf: Array) -> dict[str, Any]:
    """An array in words that JSON knows: its shape, its type, and how it is split."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    described = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
    }
    return described | ({"impl": str(jax.random.key_impl(leaf))} if _is_key(leaf) else {})


def stand_in(described: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """What `describe` was called with, without its values."""
    dtype = described["dtype"]
    if "impl" in described:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=described["impl"])).dtype
    return jax.ShapeDtypeStruct(tuple(described["shape"]), dtype)


def mesh_sizes(leaves: Mapping[str, Array]) -> dict[str, int]:
    """The sizes of the axes of the mesh that arrays lie on."""
    for leaf in leaves.values():
        if isinstance(leaf.sharding, NamedSharding):
            return dict(leaf.sharding.mesh.shape)
    return {}


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """What Orbax is to read for a leaf, and where to."""
    where = leaf.sharding
    if where is None:
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=where)


def _shard_bytes(target: jax.ShapeDtypeStruct) -> int:
    assert target.sharding is not None
    shape = target.sharding.shard_shape(target.shape)
    copies = len(target.sharding.addressable_devices)
    size = 1
    for length in shape:
        size *= length
    return size * target.dtype.itemsize * copies


def check_same(
    wanted: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]], where: str
) -> None:
    """Raise unless two sets of leaves are the same, naming each that is not."""
    faults = []
    for path in wanted.keys() - saved.keys():
        faults.append(f"{path} {_in_words(wanted[path])} is not in it")
    for path in saved.keys() - wanted.keys():
        there = saved[path]
        faults.append(f"{path} {there['dtype']}{there['shape']} is only in it")
    for path in wanted.keys() & saved.keys():
        leaf, there = wanted[path], saved[path]
        if list(leaf.shape) != there["shape"]:
            faults.append(f"{path} is of shape {there['shape']} in it, not {[*leaf.shape]}")
        elif not _converts(there["dtype"], leaf):
            faults.append(f"{path} is of type {there['dtype']} in it, not {leaf.dtype}")
    if faults:
        raise ValueError(
            f"{where} holds other arrays than are to be read: {'; '.join(sorted(faults))}. "
            "Use the model (and the optimizer) that it was made with, or read a part."
        )


def _converts(saved: str, leaf: Any) -> bool:
    """Whether a saved type is the leaf's, or both are floating-point (or complex)."""
    if saved == str(leaf.dtype):
        return True
    if saved.startswith("key<") or _is_key(leaf):
        return False
    old, new = jnp.dtype(saved), leaf.dtype
    return any(
        jnp.issubdtype(old, kind) and jnp.issubdtype(new, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )


def _in_words(leaf: Any) -> str:
    return f"{leaf.dtype}{[*leaf.shape]}"
