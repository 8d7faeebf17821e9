"""Arrays by path, written by TensorStore and read into their shardings.

Each process writes a database (OCDBT) of its own, and process 0 makes one that refers to
all. Every chunk carries its CRC-32C, which TensorStore compares whenever somebody reads it.
"""

import functools as ft
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageFileError
from ..sharding._files import is_remote, with_retries
from ..sharding._leaves import array_leaves, as_weak_as, is_key
from ..transforms._partition import Static, partition

# Where they are written

#: The folder of the database, in that of a checkpoint.
STATE = "state"
#: The folder where earlier versions wrote to object stores: Zarr arrays, and no database.
ARRAYS = "arrays"
_INLINE_BYTES, _FILE_BYTES = 2**12, 2**28
#: Half a minute in all; TensorStore's default is a quarter of an hour.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "8s"}


def _kvstore(folder: Any) -> dict[str, Any]:
    """TensorStore's spec of a folder, which may be in an object store."""
    if not is_remote(folder):
        return {"driver": "file", "path": f"{folder}/"}
    scheme, _, rest = os.fspath(folder).partition("://")
    bucket, _, path = rest.partition("/")
    where: dict[str, Any] = {"bucket": bucket, "path": f"{path.strip('/')}/"}
    if scheme != "s3":
        return {"driver": "gcs", **where}
    given = os.environ
    endpoint = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL")
    region = given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION")
    where |= {"endpoint": endpoint} if endpoint else {}
    where |= {"aws_region": region} if region else {}
    if "AWS_ACCESS_KEY_ID" in given:
        where["aws_credentials"] = {"type": "environment"}
    return {"driver": "s3", **where}


def _context() -> Any:
    """The settings of TensorStore."""
    import tensorstore as ts

    return ts.Context(
        {
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
            # TensorStore would wait for the disk after each batch; we do so at the end.
            "file_io_sync": False,
        }
    )


def _ocdbt(folder: Any) -> dict[str, Any]:
    """TensorStore's spec of the database of arrays in a folder."""
    return {"driver": "ocdbt", "base": _kvstore(folder)}


def part_of_process(folder: Any, save: str) -> Any:
    """The folder that this process writes to, in that of a checkpoint."""
    return folder / STATE / f"ocdbt.process_{jax.process_index()}_crc32c_{save}"


def _written_to(folder: Any) -> dict[str, Any]:
    """TensorStore's spec of a database to write."""
    return {
        **_ocdbt(folder),
        # The shapes and dtypes of the arrays are in the tables, and these are in files of
        # their own, so that the files in `d` have nothing but chunks.
        "config": {"max_inline_value_bytes": _INLINE_BYTES},
        "value_data_prefix": "d/",
        "btree_node_data_prefix": "tables/",
        "version_tree_node_data_prefix": "tables/",
        # Several files, of which threads write one each.
        "target_data_file_size": _FILE_BYTES,
    }


def merge(folder: Any, save: str) -> None:
    """Make one database, which refers to those that all processes have written.

    **Arguments:**

    - `folder`: the folder of a checkpoint.
    - `save`: the name of the save.
    """
    import tensorstore as ts

    state = folder / STATE
    settings = _context()
    whole = ts.KvStore.open(_ocdbt(state), context=settings).result()
    transaction = ts.Transaction(atomic=True)
    copies = [
        ts.KvStore.open(_ocdbt(part), context=settings)
        .result()
        .experimental_copy_range_to(whole.with_transaction(transaction))
        # Not `glob`, which the folder's own name could mislead.
        for part in state.iterdir()
        if part.name.startswith("ocdbt.process_") and part.name.endswith(f"_{save}")
    ]
    for copy in copies:
        copy.result()
    transaction.commit_sync()


# Write

#: A shard that several devices hold is written in parts, one by each of them, if it is at
#: least this large. Cutting the parts takes a program for each shape, and more files.
_PART_BYTES = 2**24
#: How many bytes are on their way to the disk or the store at a time: chunks that are not
#: contiguous in memory are copied. It is more where a save would need more batches.
_BATCH_BYTES, _MOST_BATCHES = 2**25, 64
_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


class _Part(NamedTuple):
    """The shards of an array that a process writes."""

    shape: tuple[int, ...]  #: The shape of the whole array.
    dtype: Any
    chunk: tuple[int, ...]
    #: For each, where in the array it begins, and its numbers.
    shards: list[tuple[tuple[int, ...], np.ndarray]]


def copy_parts(arrays: Mapping[str, jax.Array], chunk_bytes: int) -> dict[str, _Part]:
    """Copy this process's parts of arrays, so that these may be donated.

    On CPUs the memory is shared instead, and the next step leaves it alone.

    **Arguments:**

    - `arrays`: arrays by path.
    - `chunk_bytes`: the most bytes of a chunk, if it can be cut to that.
    """
    shapes = {path: _part_shape(array) for path, array in arrays.items()}
    ours = {path: [*_cut(array, shapes[path])] for path, array in arrays.items()}
    # Begin all copies before waiting for the first one.
    for shards in ours.values():
        for _, data in shards:
            data.copy_to_host_async()
    return {
        path: _Part(
            array.shape,
            array.dtype,
            _chunk(array.shape, shapes[path], array.dtype.itemsize, chunk_bytes),
            [(begin, np.asarray(data)) for begin, data in ours.pop(path)],
        )
        for path, array in arrays.items()
    }


def _part_shape(array: jax.Array) -> tuple[int, ...]:
    """The shape that one device writes: a shard, or a part of one that others hold, too."""
    shape = [*array.sharding.shard_shape(array.shape)]
    size = math.prod(shape)
    copies = len(array.sharding.device_set) * size // array.size
    even = [n for n in shape if n % copies == 0]
    if copies > 1 and even and size * array.dtype.itemsize >= _PART_BYTES:
        shape[shape.index(max(even))] //= copies
    return tuple(shape)


def _cut(
    array: jax.Array, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Where each part that this process writes begins, and the part."""
    for shard in array.addressable_shards:
        begin, data = [dim.start or 0 for dim in shard.index], shard.data
        cut = [dim for dim, n in enumerate(shape) if n < data.shape[dim]]
        for dim in cut:
            at = shard.replica_id * shape[dim]
            begin[dim] += at
            data = jax.lax.dynamic_slice_in_dim(data, at, shape[dim], dim)
        if cut or shard.replica_id == 0:
            # A new array: the old one would keep its shard's copy as long as it lives.
            yield (
                tuple(begin),
                jax.make_array_from_single_device_arrays(shape, data.sharding, [data]),
            )


def _chunk(
    shape: tuple[int, ...], part: tuple[int, ...], itemsize: int, most: int
) -> tuple[int, ...]:
    """The shape of chunks: the longest dims of a part are cut until chunks are small."""
    chunk = [*part]
    while math.prod(chunk) * itemsize > most:
        cut = [
            _cut_length(n, evenly=mine < whole)
            for n, mine, whole in zip(chunk, part, shape)
        ]
        if cut == chunk:
            break
        dim = max((dim for dim, n in enumerate(chunk) if cut[dim] < n), key=cut.__getitem__)
        chunk[dim] = cut[dim]
    return tuple(chunk)


def _cut_length(length: int, *, evenly: bool) -> int:
    """A length cut once: to half of it or, evenly, by its smallest divisor.

    **Arguments:**

    - `length`: the length of a chunk along one dim.
    - `evenly`: whether it must remain a divisor: no two processes may write one chunk, so
        along a dim that is split between them, their parts consist of whole chunks.
    """
    if not evenly:
        return -(-length // 2)
    return length // next((n for n in range(2, length + 1) if length % n == 0), 1)


def write_parts(parts: dict[str, _Part], folder: Any, given_up: threading.Event) -> None:
    """Write each part into its own Zarr array, in a database, and free its memory.

    **Arguments:**

    - `parts`: the parts, by the paths of their arrays; empty at the end.
    - `folder`: the folder of the database.
    - `given_up`: once it is set, `OSError` is raised after a batch.
    """
    import tensorstore as ts

    base, settings = _written_to(folder), _context()
    size = sum(each.nbytes for part in parts.values() for _, each in part.shards)
    slabs = _slabs(parts)
    while batch := [*_take(slabs, max(_BATCH_BYTES, size // _MOST_BATCHES))]:
        if given_up.is_set():
            raise OSError("the save was given up")
        transaction = ts.Transaction(atomic=True)
        opened = {
            path: ts.open(
                _spec(base, path, part), context=settings, transaction=transaction
            )
            for path, part in {path: part for path, part, *_ in batch}.items()
        }
        writes = [
            # Nobody changes the numbers, so they need not be copied once more.
            opened[path]
            .result()[_box(begin, numbers.shape)]
            .write(numbers, can_reference_source_data_indefinitely=True)
            for path, _, begin, numbers in batch
        ]
        for write in writes:
            write.result()
        transaction.commit_sync()


#: A path, its part, where in the array it begins, and the numbers.
_Slab = tuple[str, _Part, tuple[int, ...], np.ndarray]


def _slabs(parts: dict[str, _Part]) -> Iterator[_Slab]:
    """The parts, cut to the length of a chunk along the first dim."""
    while parts:
        path, part = parts.popitem()
        while part.shards:
            begin, numbers = part.shards.pop()
            if not part.shape:
                yield path, part, begin, numbers
                continue
            for at in range(0, len(numbers), part.chunk[0]):
                slab = numbers[at : at + part.chunk[0]]
                yield path, part, (begin[0] + at, *begin[1:]), slab


def _take(slabs: Iterator[_Slab], most: int) -> Iterator[_Slab]:
    size = 0
    while size < most and (slab := next(slabs, None)) is not None:
        size += slab[-1].nbytes
        yield slab


def _spec(base: Mapping[str, Any], path: str, part: _Part) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": part.chunk}}
    return {
        "driver": "zarr3",
        "kvstore": {**base, "path": f"{path}/"},
        "metadata": {
            "shape": part.shape,
            "data_type": str(part.dtype),
            "chunk_grid": grid,
            "codecs": _CODECS,
        },
        "create": True,
        "open": True,
        # Chunks of zeros are written, too: a chunk that is not there is damage.
        "store_data_equal_to_fill_value": True,
    }


def _box(begin: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(begin, shape))


# Read

#: How many chunks are read at a time. They take memory in addition to the part of an array
#: that is read.
_CHUNKS_AT_A_TIME = 4
#: TensorStore's name for the memory of the tables that say where in its files an array is.
_TABLES, _TABLE_BYTES = "cache_pool#tables", 2**24
#: Prefixes of TensorStore's errors that say nothing about the data.
_FAILURES = (
    *("UNKNOWN:", "UNAVAILABLE:", "DEADLINE_EXCEEDED:", "ABORTED:", "INTERNAL:"),
    *("PERMISSION_DENIED:", "UNAUTHENTICATED:", "RESOURCE_EXHAUSTED:", "CANCELLED:"),
)


class DamageError(UsageError):
    """The data that were read are not those that were written."""


def read(folder: Any, wanted: Mapping[str, Any]) -> dict[str, Array]:
    """Read arrays by path, in order, each into the sharding of its leaf.

    Keys are not wrapped yet. Raises `DamageError`, or `OSError` if the files cannot be
    read, even after some tries.
    """
    import tensorstore as ts

    base = _base(folder)
    # Otherwise each array would read the table of all of them again.
    tables = {_TABLES: {"total_bytes_limit": _TABLE_BYTES}}
    settings = ts.Context(tables, parent=_context())
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
    """The arrays that `read` returned, with typed keys where they are wanted."""

    def wrapped(array: Array, leaf: Any) -> Array:
        if not is_key(leaf):
            return array
        wrap = ft.partial(jax.random.wrap_key_data, impl=leaf.dtype)
        return jax.jit(wrap, out_shardings=target_sharding(leaf))(array)

    return {path: wrapped(arrays[path], leaf) for path, leaf in wanted.items()}


def _tried(named: str, function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function that reads with TensorStore; retry failures that may pass."""

    def call() -> Any:
        try:
            return function(argument)
        # TensorStore raises no other error. Its texts end with the request that failed.
        except ValueError as error:
            why = f"{named} cannot be read: {str(error).partition(' [')[0]}"
            failed = str(error).startswith(_FAILURES)
            raise (OSError if failed else DamageError)(why) from None

    return with_retries(call)


def _base(folder: Any) -> dict[str, Any]:
    """TensorStore's spec of the folder with the arrays of a checkpoint."""
    if (folder / STATE).exists():
        return {**_ocdbt(folder / STATE), "cache_pool": _TABLES}
    if (folder / ARRAYS).exists():
        return _kvstore(folder / ARRAYS)
    raise UsageFileError(
        f"this process cannot see {folder}; use a directory that all hosts share."
    )


def place_parts(
    read_part: Callable[[tuple[range, ...]], np.ndarray],
    shape: tuple[int, ...],
    there: Sharding,
) -> Array:
    """Read the parts of an array one by one, each once, onto the devices that hold it."""
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
