"""The arrays of a PyTree by path, and how they are read."""

import functools as ft
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageFileError
from ..sharding._files import is_remote, with_retries
from ..sharding._leaves import array_leaves, as_weak_as, is_key
from ..transforms._partition import Static, partition
from ._database import STATE, ocdbt
from ._object_store import ARRAYS, context, kvstore

#: How many chunks are read at a time: the memory that reading takes besides the part of an
#: array that is read.
_CHUNKS_AT_A_TIME = 4
#: TensorStore's name for the memory of the tables that say where in its files an array is.
_TABLES, _TABLE_BYTES = "cache_pool#tables", 2**24
#: How the errors of TensorStore begin that say nothing about what would have been read.
_FAILURES = (
    *("UNKNOWN:", "UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:", "INTERNAL:"),
    *("PERMISSION_DENIED:", "UNAUTHENTICATED:", "RESOURCE_EXHAUSTED:", "CANCELLED:"),
)


class DamageError(UsageError):
    """What was read is not what was written."""


def read(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Read arrays by path, in order, each into the sharding of its leaf.

    Keys are not wrapped yet. Raises `DamageError`, or `OSError` if the files cannot be
    read, even after some tries.
    """
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
            empty = jnp.zeros(data.shape, data.dtype, device=there)
            arrays[path] = as_weak_as(empty, data)
            continue
        spec = {
            "driver": "zarr3",
            "kvstore": {**base, "path": f"{base.get('path', '')}{path}/"},
            "fill_missing_data_reads": False,
        }
        named = f"{path} in {folder}"
        store = _tried(
            named,
            lambda spec: ts.open(spec, open=True, read=True, context=settings).result(),
            spec,
        )
        if store.shape != data.shape:
            shapes = f"its shape is {[*store.shape]}, not {[*data.shape]}"
            raise DamageError(f"{named} cannot be read: {shapes}")
        read_part = ft.partial(_tried, named, ft.partial(_read_part, store, data.dtype))
        arrays[path] = as_weak_as(place_parts(read_part, data.shape, there), data)
    return arrays


def wrap_keys(arrays: Mapping[str, Array], wanted: Mapping[str, Any]) -> dict[str, Array]:
    """What `read` returned, with typed keys where they are wanted."""

    def wrapped(array: Array, leaf: Any) -> Array:
        if not is_key(leaf):
            return array
        wrap = ft.partial(jax.random.wrap_key_data, impl=leaf.dtype)
        return jax.jit(wrap, out_shardings=target_sharding(leaf))(array)

    return {path: wrapped(arrays[path], leaf) for path, leaf in wanted.items()}


def _tried(named: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function that reads by TensorStore, again if it fails for a while."""

    def call() -> Any:
        try:
            return function(argument)
        # All of TensorStore's are, and end with what it was asked to do.
        except ValueError as error:
            why = f"{named} cannot be read: {str(error).partition(' [')[0]}"
            failed = str(error).startswith(_FAILURES)
            raise (OSError if failed else DamageError)(why) from None

    return with_retries(call)


def _base(folder: Any) -> dict[str, Any]:
    """Where the arrays of a checkpoint are, as TensorStore names it."""
    if is_remote(folder) and (folder / ARRAYS).exists():
        return kvstore(folder / ARRAYS)
    if not (folder / STATE).exists():
        raise UsageFileError(
            f"this process cannot see {folder}; use a directory that all hosts share."
        )
    return {**ocdbt(folder / STATE), "cache_pool": _TABLES}


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


def _read_part(store: Any, dtype: Any, part: tuple[range, ...]) -> np.ndarray:
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
        raise UsageError(f"two arrays have the path {twice}; use dict keys without dots.")
    return by_path, static


def target_sharding(leaf: Any) -> Sharding:
    """The sharding of an array or `jax.ShapeDtypeStruct`; by default, the first device."""
    return leaf.sharding or SingleDeviceSharding(jax.devices()[0])
