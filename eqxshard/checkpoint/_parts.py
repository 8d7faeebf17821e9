"""The parts of arrays that a process holds, on their way from devices to TensorStore.

Each chunk carries its CRC-32C, which TensorStore compares whenever somebody reads it.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

#: Copies of an array on several devices each write a part of it if that is this large: to
#: cut the parts takes a program for each shape, and more files.
_PART_BYTES = 2**24
#: How much is on its way to the disk or the store at a time, because chunks that are not
#: contiguous in the memory are copied; or, of much, one of so many batches.
_BATCH_BYTES, _MOST_BATCHES = 2**25, 64
_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]


class Part(NamedTuple):
    """What a process writes of an array."""

    shape: tuple[int, ...]  #: Of the whole array.
    dtype: Any
    chunk: tuple[int, ...]
    #: Where in the array each begins, and the numbers.
    shards: list[tuple[tuple[int, ...], np.ndarray]]


def copy_parts(arrays: Mapping[str, jax.Array], chunk_bytes: int) -> dict[str, Part]:
    """Copy this process's parts of arrays, so that these may be donated.

    On CPUs the memory is shared, and the next step leaves it alone.

    **Arguments:**

    - `arrays`: arrays by path.
    - `chunk_bytes`: how many bytes a chunk has at most, if it can be cut to that.
    """
    shapes = {path: _part_shape(array) for path, array in arrays.items()}
    ours = {path: [*_cut(array, shapes[path])] for path, array in arrays.items()}
    # Begin all copies before waiting for the first one.
    for shards in ours.values():
        for _, data in shards:
            data.copy_to_host_async()
    return {
        path: Part(
            array.shape,
            array.dtype,
            _chunk(array.shape, shapes[path], array.dtype.itemsize, chunk_bytes),
            [(begin, np.asarray(data)) for begin, data in ours.pop(path)],
        )
        for path, array in arrays.items()
    }


def _part_shape(array: jax.Array) -> tuple[int, ...]:
    """The shape of what one device writes: a shard, or a part of one that has copies."""
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
            # The array would keep the copy of its own shard as long as it lives.
            yield (
                tuple(begin),
                jax.make_array_from_single_device_arrays(shape, data.sharding, [data]),
            )


def _chunk(
    shape: tuple[int, ...], part: tuple[int, ...], itemsize: int, most: int
) -> tuple[int, ...]:
    """The shape of chunks: the longest dims of a part are cut until these are small."""
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
    """Half of a length, or so.

    **Arguments:**

    - `length`: of a chunk, along one dim.
    - `evenly`: whether it must remain a divisor: no two processes may write one chunk, so
        along a dim that is split between them, their parts consist of whole chunks.
    """
    if not evenly:
        return -(-length // 2)
    return length // next((n for n in range(2, length + 1) if length % n == 0), 1)


def write_parts(
    parts: dict[str, Part],
    base: Mapping[str, Any],
    settings: Any,
    given_up: threading.Event,
    *,
    atomic: bool,
) -> None:
    """Write each part into its own Zarr array, and forget it.

    **Arguments:**

    - `parts`: the parts, by the paths of their arrays; empty at the end.
    - `base`: where to write, as TensorStore names it.
    - `settings`: TensorStore's context.
    - `given_up`: once it is set, `OSError` is raised after a batch.
    - `atomic`: whether TensorStore commits many writes at once, which OCDBT is made for.
    """
    import tensorstore as ts

    size = sum(each.nbytes for part in parts.values() for _, each in part.shards)
    slabs = _slabs(parts)
    while batch := [*_take(slabs, max(_BATCH_BYTES, size // _MOST_BATCHES))]:
        if given_up.is_set():
            raise OSError("the save was given up")
        transaction = ts.Transaction(atomic=True) if atomic else None
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
        if transaction is not None:
            transaction.commit_sync()


#: A path, its part, where in the array it begins, and the numbers.
_Slab = tuple[str, Part, tuple[int, ...], np.ndarray]


def _slabs(parts: dict[str, Part]) -> Iterator[_Slab]:
    """Parts of one chunk's length along the first dim."""
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


def _spec(base: Mapping[str, Any], path: str, part: Part) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": part.chunk}}
    return {
        "driver": "zarr3",
        "kvstore": {**base, "path": f"{base.get('path', '')}{path}/"},
        "metadata": {
            "shape": part.shape,
            "data_type": str(part.dtype),
            "chunk_grid": grid,
            "codecs": _CODECS,
        },
        "create": True,
        "open": True,
        # A chunk that is not there is damage.
        "store_data_equal_to_fill_value": True,
    }


def _box(begin: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(begin, shape))
