"""Batches gathered on the host, ahead of the steps, and placed on their devices."""

import functools
import itertools
import math
import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from ._host import HostBatches, check_integers
from ._weights import WEIGHT

#: Passing something from one thread to another costs as much as gathering a batch of
#: small images, so small batches are gathered and passed on together.
_TOGETHER_BYTES = 2**21
_TOGETHER_BATCHES = 16


class HostPipeline:
    """A Grain pipeline that gathers batches in a thread or in worker processes.

    **Arguments:**

    - `host`: makes the batches.
    - `sharding`: of a batch on its devices.
    - `prefetch`, `workers`: as for the loader.
    """

    def __init__(
        self, host: HostBatches, sharding: NamedSharding, prefetch: int, workers: int
    ):
        self._host = host
        self._sharding = sharding
        self._prefetch = prefetch
        self._workers = workers
        self._shared: Array | None = None

    def batches(self, steps: range) -> Generator[dict[str, Array], None, None]:
        """The batches of some steps; close it to end its thread early."""
        with closing(self._host_batches(steps)) as host_batches:
            for arrays in host_batches:
                # Here and not ahead, as jax.enable_x64 may hold for this thread only.
                check_integers(arrays)
                batch = {name: self._place(array) for name, array in arrays.items()}
                if self._host.pads and WEIGHT not in batch:
                    batch[WEIGHT] = self._full_weight()
                yield batch

    def _host_batches(self, steps: range) -> Generator[dict[str, np.ndarray], None, None]:
        if not steps:
            return
        if not self._prefetch and not self._workers:
            # Passing through Grain takes as long as gathering a small batch.
            for step in steps:
                yield from self._host.gather(range(step, step + 1))
            return
        first, stop = steps.start, steps.stop
        (batch,) = self._host.gather(range(first, first + 1))
        if first + 1 == stop:
            yield batch
            return
        # Grain takes as long to import as JAX, so the first step of a process does not wait
        # for it; but workers, which take longer to start, do so during that step.
        late = not self._workers and "grain" not in sys.modules
        if late:
            yield batch
        import grain

        together, ahead = 1, self._prefetch
        nbytes = sum(array.nbytes for array in batch.values())
        small = 2 * nbytes <= _TOGETHER_BYTES and self._host.transform is None
        if small:
            together = min(_TOGETHER_BYTES // max(nbytes, 1), _TOGETHER_BATCHES)
            # At least two: with one, the thread would wait for us as often as we for it.
            ahead = max(math.ceil(self._prefetch / together), 2)
        chunks = grain.MapDataset.range(first + 1, stop, together).map(
            functools.partial(_gather_chunk, self._host, together, stop)
        )
        if self._workers:
            _parse_flags()
            dataset = chunks.to_iter_dataset(grain.ReadOptions(num_threads=0)).mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self._workers,
                    per_worker_buffer_size=max(math.ceil(ahead / self._workers), 1),
                )
            )
        else:
            dataset = chunks.to_iter_dataset(
                grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
            )
        with closing(iter(dataset)) as gathered:
            gathered.start_prefetch()
            if not late:
                yield batch
            yield from itertools.chain.from_iterable(gathered)

    def _place(self, array: np.ndarray) -> Array:
        return place_rows(
            array, self._sharding, self._host.positions, self._host.batch_size
        )

    def _full_weight(self) -> Array:
        """The weight of all full batches, until somebody donates it."""
        if self._shared is None or self._shared.is_deleted():
            self._shared = self._place(np.ones(len(self._host.positions), np.float32))
        return self._shared


def _gather_chunk(
    host: HostBatches, together: int, stop: int, start: int
) -> list[dict[str, np.ndarray]]:
    """The batches of `together` steps, or of those before `stop`, gathered at once."""
    return host.gather(range(start, min(start + together, stop)))


def _parse_flags() -> None:
    """Grain asks absl for flags, which only programs of absl's have parsed."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def place_rows(
    array: np.ndarray, sharding: NamedSharding, positions: np.ndarray, batch_size: int
) -> Array:
    """A batch's array, of which this process holds the rows at some positions."""
    # Each device gets its own rows. (device_put takes twice as long.)
    shape = (batch_size, *array.shape[1:])
    if len(array) == batch_size:
        return jax.make_array_from_callback(shape, sharding, array.__getitem__)

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(batch_size)
        return array[slice(*np.searchsorted(positions, (start, stop)))]

    return jax.make_array_from_callback(shape, sharding, part)


def positions_on_this_process(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """The positions in a batch whose devices belong to this process, in order."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = [range(batch_size)[index[0]] for index in indices if index is not None]
    if not rows:
        raise ValueError(
            "no device of the mesh belongs to this process, so it has no part of a batch; "
            "make the mesh of devices of all processes."
        )
    return np.unique(np.concatenate(rows))
