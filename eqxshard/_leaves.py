"""The arrays of a PyTree by their paths, written by Orbax and read by tensorstore."""

import functools as ft
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import Array, PyTree

from .sharding import is_array, is_key, leaf_path
from .transforms import Skeleton, split

#: Arrays are written in chunks of at most so many bytes, and read so many chunks at a
#: time: this is what reading takes, besides the part of an array that is read.
_CHUNK_BYTES = 2**21
_CHUNKS_AT_A_TIME = 4
_FILE_BYTES = 2**28


def write(folder: Any, leaves: dict[str, Any]) -> Any:
    """Begin to write arrays; returns once they are copied from their devices."""
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_is_news)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Several files, whose checksums are made side by side.
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    # It takes longer than a disk does, and numbers that are trained hardly get smaller.
    context.array.saving.use_compression = False
    with context:
        return ocp.save_async(
            folder,
            {
                path: jax.random.key_data(leaf) if is_key(leaf) else leaf
                for path, leaf in leaves.items()
                # Orbax refuses them, and there is nothing to save.
                if leaf.size
            },
        )


def _is_news(record: logging.LogRecord) -> bool:
    # Each of Orbax's threads logs what it raises, with a traceback; we say it, too.
    return "_SignalingThread.run() raised" not in record.getMessage()


def read(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Read arrays by their paths, in order, each to where its leaf is or is to be."""
    # Not by Orbax, which reads all chunks of several parts at once, in parts that lie
    # across chunks even all of the array: several times the memory of what is read.
    import tensorstore as ts

    manifests = list(folder.glob("*/manifest.ocdbt"))
    if not manifests:
        raise FileNotFoundError(
            f"{folder} cannot be seen by this process; use a directory that all hosts "
            "share."
        )
    (manifest,) = manifests
    base = f"{os.fspath(manifest.parent)}/"
    base = base if "://" in base else {"driver": "file", "path": base}
    arrays = {}
    for path, leaf in wanted.items():
        target = _target(leaf)
        assert target.sharding is not None
        if leaf.size:
            where = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            spec = {"driver": "zarr3", "kvstore": where}
            array = _read_array(ts.open(spec, open=True, read=True).result(), target)
        else:
            empty = np.zeros(target.shape, target.dtype)
            there = target.sharding
            array = jax.make_array_from_callback(empty.shape, there, empty.__getitem__)
        if is_key(leaf):
            wrap = ft.partial(jax.random.wrap_key_data, impl=leaf.dtype)
            array = jax.jit(wrap, out_shardings=target.sharding)(array)
        arrays[path] = array
    return arrays


def _read_array(store: Any, target: jax.ShapeDtypeStruct) -> Array:
    """Read one part after the other, each once, to the devices that it is for."""
    there = target.sharding
    assert there is not None
    devices: dict[tuple[range, ...], list[Any]] = {}
    for device, index in there.addressable_devices_indices_map(target.shape).items():
        part = tuple(range(n)[at] for n, at in zip(target.shape, index or ()))
        devices.setdefault(part, []).append(
            SingleDeviceSharding(device, memory_kind=there.memory_kind)
        )
    shards = []
    for part, places in devices.items():
        on_host = _read_part(store, part, target.dtype)
        # A copy, as a step cannot donate NumPy's memory; waited for, so that it goes.
        copies = [jax.device_put(on_host, place, may_alias=False) for place in places]
        shards += jax.block_until_ready(copies)
    return jax.make_array_from_single_device_arrays(target.shape, there, shards)


def _read_part(store: Any, part: tuple[range, ...], dtype: Any) -> np.ndarray:
    """Read what of an array lies in a range of each dim, a few chunks at a time."""
    import tensorstore as ts

    out = np.empty([len(dim) for dim in part], dtype)
    into = ts.array(out)
    if part:
        into = into.translate_to[tuple(dim.start for dim in part)]
    store = store if store.dtype == into.dtype else ts.cast(store, into.dtype)
    lengths = store.chunk_layout.read_chunk.shape or ()
    # Chunks begin at multiples of their lengths; the first one may have begun before.
    begins = [
        range(dim.start - dim.start % length, dim.stop, length)
        for dim, length in zip(part, lengths)
    ]
    chunks = itertools.product(*begins)
    while few := list(itertools.islice(chunks, _CHUNKS_AT_A_TIME)):
        writes = []
        for chunk in few:
            box = tuple(
                slice(max(begin, dim.start), min(begin + length, dim.stop))
                for begin, length, dim in zip(chunk, lengths, part)
            )
            writes.append(into[box].write(store[box]))
        for write in writes:
            write.result()
    return out


def split_by_path(tree: PyTree, root: str = "") -> tuple[dict[str, Any], Skeleton]:
    """As `split`, with the arrays by their paths."""
    arrays, skeleton = split(tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [leaf_path(path, root) for path, leaf in leaves if is_array(leaf)]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(
            f"two arrays have the path {twice[0]}; use names without dots in dicts."
        )
    return dict(zip(paths, arrays, strict=True)), skeleton


def describe(leaf: Array) -> dict[str, Any]:
    """An array in words that JSON knows: its shape, its type, and how it is split."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    described = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
    }
    return described | ({"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else {})


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


def place_of(leaf: Any) -> Sharding:
    """Where an array is, or is to be: without a word of it, on the first device."""
    return leaf.sharding or SingleDeviceSharding(jax.devices()[0])


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """What is to be read for a leaf, and where to."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=place_of(leaf))


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
    if saved.startswith("key<") or is_key(leaf):
        return False
    old, new = jnp.dtype(saved), leaf.dtype
    return any(
        jnp.issubdtype(old, kind) and jnp.issubdtype(new, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )


def _in_words(leaf: Any) -> str:
    return f"{leaf.dtype}{[*leaf.shape]}"
