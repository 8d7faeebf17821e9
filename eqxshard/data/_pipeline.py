"""Batches gathered on the host, ahead of the steps, and placed on their devices."""

import functools
import math
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._errors import UsageError
from ..sharding._placement import from_host
from ._host import HostBatches

_Arrays = dict[str, np.ndarray]

#: Passing something from one thread to another costs as much as gathering a batch of
#: small images, so small batches are gathered and passed on together.
_TOGETHER_BYTES = 2**21
_TOGETHER_BATCHES = 16


def gather_ahead(
    host: HostBatches, steps: range, *, prefetch: int, workers: int
) -> Generator[list[_Arrays], None, None]:
    """Batches from a Grain pipeline, which gathers them in a thread or in workers.

    **Arguments:**

    - `host`: makes the batches.
    - `steps`: those of the batches.
    - `prefetch`, `workers`: as for the loader.

    **Returns:**

    A generator of the batches, one or more at a time; close it to end its thread early.
    """
    gather = functools.partial(_gather, host, steps.stop)
    if not prefetch and not workers:
        # Passing through Grain takes as long as gathering a small batch.
        yield from map(gather, steps)
        return
    if not steps:
        return
    (batch,) = gather(steps.start)
    # Grain takes as long to import as JAX, so the first step of a process does not wait
    # for it; but workers, which take longer to start, do so during that step.
    late = not workers and "grain" not in sys.modules
    if late or len(steps) == 1:
        yield [batch]
    if len(steps) == 1:
        return
    import grain

    together, ahead = 1, prefetch
    nbytes = sum(array.nbytes for array in batch.values())
    if 2 * nbytes <= _TOGETHER_BYTES and host.transform is None:
        together = min(_TOGETHER_BYTES // max(nbytes, 1), _TOGETHER_BATCHES)
        # At least two: with one, the thread would wait for us as often as we for it.
        ahead = max(math.ceil(prefetch / together), 2)
    chunks = grain.MapDataset.range(steps.start + 1, steps.stop, together)
    chunks = chunks.map(functools.partial(gather, count=together))
    options = grain.ReadOptions(num_threads=0 if workers else 1, prefetch_buffer_size=ahead)
    dataset = chunks.to_iter_dataset(options)
    if workers:
        _parse_flags()
        each = max(math.ceil(ahead / workers), 1)
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(workers, each))
    with closing(iter(dataset)) as gathered:
        gathered.start_prefetch()
        if not late:
            yield [batch]
        yield from gathered


def _gather(host: HostBatches, stop: int, start: int, count: int = 1) -> list[_Arrays]:
    """The batches of some steps from `start` on, but not of `stop`, gathered at once."""
    return host.gather(range(start, min(start + count, stop)))


def _parse_flags() -> None:
    """Grain asks absl for flags, which only programs of absl's have parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def checked_step(step: int) -> int:
    """A step that a loader is to go to; raise `ValueError` if it is negative."""
    if step < 0:
        raise UsageError(f"step {step} is before the start; seek to 0 or a later step.")
    return int(step)


def place_rows(
    array: np.ndarray, sharding: NamedSharding, positions: np.ndarray, batch_size: int
) -> Array:
    """A batch's array, of which this process holds the rows at some positions."""
    # Each device gets its own rows.
    shape = (batch_size, *array.shape[1:])
    if len(array) == batch_size:
        return from_host(shape, sharding, array.__getitem__)

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(batch_size)
        return array[slice(*np.searchsorted(positions, (start, stop)))]

    return from_host(shape, sharding, part)


def positions_on_this_process(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """The positions in a batch whose devices belong to this process, in order."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = [range(batch_size)[index[0]] for index in indices if index is not None]
    if not rows:
        raise UsageError(
            "no device of the mesh belongs to this process, so it has no part of a batch; "
            "make the mesh of devices of all processes."
        )
    return np.unique(np.concatenate(rows))
