"""The arrays of a PyTree by path, written by Orbax and read by TensorStore."""

import functools as ft
import itertools
import logging
import operator
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import Array, PyTree

from ..sharding._leaves import array_leaves, format_array, is_key
from ..sharding._paths import is_remote
from ..sharding._text import first_few
from ..transforms._partition import Static, partition
from ._object_store import ARRAYS, Upload, context, kvstore

#: Arrays are written in chunks of at most this many bytes, and read this many chunks at a
#: time: the memory that reading takes besides the part of an array that is read.
_CHUNK_BYTES = 2**21
_CHUNKS_AT_A_TIME = 4
_FILE_BYTES = 2**28
#: Copies of an array on several devices each write a part of it if that is this large: to
#: cut the parts takes a program for each shape, and more files.
_PART_BYTES = 2**24
#: TensorStore's name for the memory of the tables that say where in its files an array is.
_TABLES, _TABLE_BYTES = "cache_pool#tables", 2**24
#: How long processes that have written wait for others. By default 20 minutes, for which a
#: process that has given up cannot end, because Orbax's thread does not.
_PATIENCE_SECONDS = 300


def write(folder: Any, leaves: dict[str, Any]) -> Any:
    """Begin to write arrays; return once they are copied from their devices."""
    if is_remote(folder):
        return Upload(folder, leaves)
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_is_news)
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Several files, so that checksums are computed in parallel.
    context.array.saving.ocdbt_target_data_file_size = _FILE_BYTES
    # Compression is slower than a disk, and trained numbers hardly compress.
    context.array.saving.use_compression = False
    context.array.saving.min_slice_bytes_for_replica_parallel = _PART_BYTES
    context.asynchronous.timeout_secs = _PATIENCE_SECONDS
    with context:
        return ocp.save_async(
            folder,
            {
                path: jax.random.key_data(leaf) if is_key(leaf) else leaf
                for path, leaf in leaves.items()
                # Orbax refuses empty arrays, and there is nothing to save.
                if leaf.size
            },
        )


def _is_news(record: logging.LogRecord) -> bool:
    # Each of Orbax's threads logs its error with a traceback, and so do we.
    return "_SignalingThread.run() raised" not in record.getMessage()


def read(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Read arrays by path, in order, each into the sharding of its leaf."""
    # Orbax would read all chunks of several parts at once, and the whole array for parts
    # that straddle chunks: several times the memory of the arrays that are read.
    import tensorstore as ts

    base = _base(folder)
    # Else each array would read the table of all of them again.
    tables = {_TABLES: {"total_bytes_limit": _TABLE_BYTES}}
    settings = ts.Context(tables, parent=context() if is_remote(folder) else None)
    arrays = {}
    for path, leaf in wanted.items():
        target = _target(leaf)
        assert target.sharding is not None
        if leaf.size:
            where = {**base, "path": f"{base.get('path', '')}{path}/"}
            spec = {"driver": "zarr3", "kvstore": where}
            try:
                store = ts.open(spec, open=True, read=True, context=settings).result()
                _check_store(store, target)
                read_part = ft.partial(_read_part, store, dtype=target.dtype)
                array = place_parts(read_part, target)
            except ValueError as error:
                why = str(error).partition(" [source")[0]
                raise ValueError(
                    f"{path} in {folder} cannot be read ({why}); use another checkpoint."
                ) from None
        else:
            empty = np.zeros(target.shape, target.dtype)
            there = target.sharding
            array = jax.make_array_from_callback(empty.shape, there, empty.__getitem__)
        if is_key(leaf):
            wrap = ft.partial(jax.random.wrap_key_data, impl=leaf.dtype)
            array = jax.jit(wrap, out_shardings=target.sharding)(array)
        arrays[path] = array
    return arrays


def _check_store(store: Any, target: jax.ShapeDtypeStruct) -> None:
    """Refuse arrays that would take more memory than the one that is read."""
    chunk = store.chunk_layout.read_chunk.shape or store.shape
    if store.shape != target.shape:
        raise ValueError(f"its shape is {[*store.shape]}, not {[*target.shape]}")
    if any(length > size for length, size in zip(chunk, store.shape)):
        raise ValueError(f"its chunks of shape {[*chunk]} are larger than it is")


def _base(folder: Any) -> dict[str, Any]:
    """Where the arrays of a checkpoint are, as TensorStore names it."""
    if is_remote(folder) and (folder / ARRAYS).exists():
        return kvstore(folder / ARRAYS)
    manifests = list(folder.glob("*/manifest.ocdbt"))
    if not manifests:
        raise FileNotFoundError(
            f"this process cannot see {folder}; use a directory that all hosts share."
        )
    (manifest,) = manifests
    base = f"{os.fspath(manifest.parent)}/"
    return {
        "driver": "ocdbt",
        "cache_pool": _TABLES,
        "base": base if is_remote(base) else {"driver": "file", "path": base},
    }


def place_parts(
    read_part: Callable[[tuple[range, ...]], np.ndarray], target: jax.ShapeDtypeStruct
) -> Array:
    """Read one part after the other, each once, onto the devices that hold it."""
    there = target.sharding
    assert there is not None
    devices: dict[tuple[range, ...], list[Any]] = {}
    for device, index in there.addressable_devices_indices_map(target.shape).items():
        part = tuple(range(n)[at] for n, at in zip(target.shape, index or ()))
        devices.setdefault(part, []).append(
            SingleDeviceSharding(device, memory_kind=there.memory_kind)
        )
    shards = []
    for part, shardings in devices.items():
        on_host = read_part(part)
        # Waited for, to free the memory of the host.
        shards += jax.block_until_ready([_copy_to(each, on_host) for each in shardings])
    return jax.make_array_from_single_device_arrays(target.shape, there, shards)


def _copy_to(there: SingleDeviceSharding, on_host: np.ndarray) -> Array:
    """Copy to a device: a step cannot donate NumPy's memory."""
    array = jax.device_put(on_host, there, may_alias=False)
    if next(iter(there.device_set)).platform != "cpu":
        return array
    # JAX 0.10 uses the memory of NumPy nevertheless if it is aligned.
    aliases = array.unsafe_buffer_pointer() == on_host.ctypes.data
    return jax.device_put(array, there, may_alias=False) if aliases else array


def _read_part(store: Any, part: tuple[range, ...], dtype: Any) -> np.ndarray:
    """Read a range of each dim of an array, a few chunks at a time."""
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


def partition_by_path(tree: PyTree, root: str = "") -> tuple[dict[str, Any], Static]:
    """As `partition`, with the arrays by their paths."""
    _, static = partition(tree)
    leaves = array_leaves(tree, root)
    twice = [
        path for path, count in Counter(path for path, _ in leaves).items() if count > 1
    ]
    if twice:
        raise ValueError(
            f"two arrays have the path {twice[0]}; use dict keys without dots."
        )
    return dict(leaves), static


def array_metadata(leaf: Array) -> dict[str, Any]:
    """The shape, dtype and spec of an array, as JSON values."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    described = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
    }
    return described | ({"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else {})


def abstract_array(described: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `array_metadata` describes."""
    dtype = described["dtype"]
    if "impl" in described:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=described["impl"])).dtype
    elif not any(jnp.issubdtype(jnp.dtype(dtype), kind) for kind in (jnp.number, bool)):
        raise TypeError(f"{dtype!r} is no dtype of an array")
    return jax.ShapeDtypeStruct(tuple(map(operator.index, described["shape"])), dtype)


def target_sharding(leaf: Any) -> Sharding:
    """The sharding of an array or `jax.ShapeDtypeStruct`; by default, the first device."""
    return leaf.sharding or SingleDeviceSharding(jax.devices()[0])


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """What to read for a leaf, and its sharding."""
    data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=target_sharding(leaf))


def check_structure(
    wanted: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]], where: str
) -> None:
    """Raise `ValueError` naming arrays that a checkpoint lacks, or has besides."""
    faults = []
    # In the model's order; the optimizer's state, which repeats its faults, comes later.
    for path in dict.fromkeys((*wanted, *saved)):
        ours, theirs = wanted.get(path), saved.get(path)
        if theirs is None:
            faults.append(f"{path} {format_array(ours)} is missing there")
        elif ours is None:
            faults.append(f"{path} {format_array(abstract_array(theirs))} is only there")
        elif list(ours.shape) != theirs["shape"]:
            faults.append(f"{path} has shape {theirs['shape']} there, not {[*ours.shape]}")
        elif not converts(theirs["dtype"], ours):
            faults.append(f"{path} has dtype {theirs['dtype']} there, not {ours.dtype}")
    if faults:
        raise ValueError(
            f"{where} does not fit this model: {first_few(faults, '; ')}; use the model "
            "(and the optimizer) that it was made with, or read a part of it."
        )


def converts(saved: str, leaf: Any) -> bool:
    """Whether a saved dtype is the leaf's, or both are floating-point, or complex."""
    if saved == str(leaf.dtype):
        return True
    if saved.startswith("key<") or is_key(leaf):
        return False
    old, new = jnp.dtype(saved), leaf.dtype
    return any(
        jnp.issubdtype(old, kind) and jnp.issubdtype(new, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )
