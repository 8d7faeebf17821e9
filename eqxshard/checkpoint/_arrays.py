"""The arrays of a PyTree by path, written by Orbax and read by TensorStore."""

import contextlib
import functools as ft
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, PyTree

from ..sharding._files import is_remote
from ..sharding._leaves import array_leaves, is_key
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
    arrays = {
        path: jax.random.key_data(leaf) if is_key(leaf) else leaf
        for path, leaf in leaves.items()
        # Orbax refuses empty arrays, and there is nothing to save.
        if leaf.size
    }
    if is_remote(folder):
        return Upload(folder, arrays)
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_is_news)
    context = ocp.Context()
    saving = context.array.saving
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Several files, so that checksums are computed in parallel.
    saving.ocdbt_target_data_file_size = _FILE_BYTES
    # Compression is slower than a disk, and trained numbers hardly compress.
    saving.use_compression = False
    saving.min_slice_bytes_for_replica_parallel = _PART_BYTES
    context.asynchronous.timeout_secs = _PATIENCE_SECONDS
    # Should Orbax move what this extends, it writes each array by itself, and slowly.
    with contextlib.suppress(ImportError, AttributeError):
        from ._orbax import registry

        context.checkpointables.registry = registry()
        # The registry's writes it at once.
        saving.enable_write_sharding_file = False
        # Nobody reads it.
        saving.array_metadata_store = None
    with context:
        return ocp.save_checkpointables_async(folder, {"state": arrays})


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
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        there = target_sharding(leaf)
        if not leaf.size:
            array = jnp.zeros(data.shape, data.dtype, device=there)
        else:
            where = {**base, "path": f"{base.get('path', '')}{path}/"}
            spec = {"driver": "zarr3", "kvstore": where}
            try:
                store = ts.open(spec, open=True, read=True, context=settings).result()
                if store.shape != data.shape:
                    raise ValueError(f"its shape is {[*store.shape]}, not {[*data.shape]}")
                read_part = ft.partial(_read_part, store, dtype=data.dtype)
                array = place_parts(read_part, data.shape, there)
            except ValueError as error:
                why = str(error).partition(" [source")[0]
                raise ValueError(
                    f"{path} in {folder} cannot be read ({why}); use another checkpoint."
                ) from None
        if is_key(leaf):
            wrap = ft.partial(jax.random.wrap_key_data, impl=leaf.dtype)
            array = jax.jit(wrap, out_shardings=there)(array)
        arrays[path] = array
    return arrays


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
    read_part: Callable[[tuple[range, ...]], np.ndarray],
    shape: tuple[int, ...],
    there: Sharding,
) -> Array:
    """Read one part after the other, each once, onto the devices that hold it."""
    devices: dict[tuple[range, ...], list[Any]] = {}
    for device, index in there.addressable_devices_indices_map(shape).items():
        part = tuple(range(n)[at] for n, at in zip(shape, index or ()))
        devices.setdefault(part, []).append(
            SingleDeviceSharding(device, memory_kind=there.memory_kind)
        )
    shards = []
    for part, shardings in devices.items():
        on_host = read_part(part)
        # Waited for, to free the memory of the host.
        shards += jax.block_until_ready([_copy_to(each, on_host) for each in shardings])
    return jax.make_array_from_single_device_arrays(shape, there, shards)


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
    by_path = dict(leaves)
    if len(by_path) < len(leaves):
        paths = [path for path, _ in leaves]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"two arrays have the path {twice}; use dict keys without dots.")
    return by_path, static


def target_sharding(leaf: Any) -> Sharding:
    """The sharding of an array or `jax.ShapeDtypeStruct`; by default, the first device."""
    return leaf.sharding or SingleDeviceSharding(jax.devices()[0])
