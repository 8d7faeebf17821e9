"""The parts of arrays that a process holds, on their way from devices to TensorStore."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np


class Part(NamedTuple):
    """What a process writes of an array."""

    shape: tuple[int, ...]  #: Of the whole array.
    dtype: Any
    chunk: tuple[int, ...]
    shards: list[tuple[Any, np.ndarray]]  #: Where in the array, and the numbers.


def copy_parts(arrays: Mapping[str, jax.Array], chunk_bytes: int) -> dict[str, Part]:
    """Copy this process's parts of arrays, so that these may be donated.

    **Arguments:**

    - `arrays`: arrays by path.
    - `chunk_bytes`: how many bytes a chunk has at most, if it can be halved to that.
    """
    ours = {
        path: [shard for shard in array.addressable_shards if shard.replica_id == 0]
        for path, array in arrays.items()
    }
    # Begin all copies before waiting for the first one.
    for shards in ours.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    return {
        path: Part(
            array.shape,
            array.dtype,
            _chunk(array, chunk_bytes),
            [(shard.index, np.array(shard.data, copy=True)) for shard in ours[path]],
        )
        for path, array in arrays.items()
    }


def _chunk(array: jax.Array, most: int) -> tuple[int, ...]:
    # No two processes may write one chunk, so chunks are parts of shards.
    chunk = [*array.sharding.shard_shape(array.shape)]
    while np.prod(chunk) * array.dtype.itemsize > most:
        even = [n for n in chunk if n % 2 == 0]
        if not even:
            break
        chunk[chunk.index(max(even))] //= 2
    return tuple(chunk)


def write_parts(
    parts: Mapping[str, Part],
    base: Mapping[str, Any],
    settings: Any,
    transaction: Any = None,
) -> None:
    """Write each part into its own Zarr array, all at the same time.

    **Arguments:**

    - `parts`: the parts, by the paths of their arrays.
    - `base`: where to write, as TensorStore names it.
    - `settings`: TensorStore's context.
    - `transaction`: TensorStore's transaction, if it is to be all or nothing.
    """
    import tensorstore as ts

    opened = {}
    for path, part in parts.items():
        grid = {"name": "regular", "configuration": {"chunk_shape": part.chunk}}
        spec = {
            "driver": "zarr3",
            "kvstore": {**base, "path": f"{base.get('path', '')}{path}/"},
            "metadata": {
                "shape": part.shape,
                "data_type": str(part.dtype),
                "chunk_grid": grid,
            },
            # Orbax takes chunks that are not there for damage.
            "store_data_equal_to_fill_value": True,
        }
        opened[path] = ts.open(
            spec, create=True, open=True, context=settings, transaction=transaction
        )
    writes = [
        # Nobody changes the numbers, so they need not be copied once more.
        opened[path]
        .result()[index]
        .write(numbers, can_reference_source_data_indefinitely=True)
        for path, part in parts.items()
        for index, numbers in part.shards
    ]
    for write in writes:
        write.result()
    if transaction is not None:
        transaction.commit_sync()
