"""Batches gathered on the host, ahead of the steps, and placed on their devices."""

import functools
import math
import queue
import threading
from collections.abc import Generator
from contextlib import closing
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from ._host import HostBatches

_T = TypeVar("_T")
_Arrays = dict[str, np.ndarray]
#: Batches, one or more at a time.
_Chunks = Generator[list[_Arrays], None, None]

#: How long a closed iterator waits for its thread, which a source may block.
_CLOSE_SECONDS = 2
#: Passing something from one thread to another costs as much as gathering a batch of
#: small images, so small batches are gathered and passed on together.
_TOGETHER_BYTES = 2**21
_TOGETHER_BATCHES = 16


def gather_ahead(
    host: HostBatches, steps: range, *, prefetch: int, workers: int
) -> _Chunks:
    """The batches of some steps, one or more at a time; close it to end its thread early.

    **Arguments:**

    - `host`: makes the batches.
    - `steps`: the steps.
    - `prefetch`, `workers`: as for the loader.
    """
    if workers and len(steps) > 1:
        return _from_workers(host, steps, prefetch, workers)
    return make_ahead(_gathered(host, steps, prefetch), prefetch)


def _gathered(host: HostBatches, steps: range, prefetch: int) -> _Chunks:
    """The batches of some steps: one at first, and small ones several together."""
    start, together = steps.start, 1
    while start < steps.stop:
        chunk = host.gather(range(start, min(start + together, steps.stop)))
        start += len(chunk)
        yield chunk
        nbytes = sum(array.nbytes for array in chunk[0].values())
        if prefetch and host.transform is None:
            together = min(max(_TOGETHER_BYTES // max(nbytes, 1), 1), _TOGETHER_BATCHES)


def _from_workers(host: HostBatches, steps: range, prefetch: int, workers: int) -> _Chunks:
    """The batches of some steps, made by worker processes."""
    # Grain takes as long to import as JAX.
    import grain
    from absl import flags

    # Grain asks absl for flags, which only programs of absl's have parsed.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(
        num_workers=workers,
        per_worker_buffer_size=max(math.ceil(prefetch / workers), 1),
    )
    dataset = (
        grain.MapDataset.range(steps.start + 1, steps.stop)
        .map(functools.partial(_gather_one, host))
        .to_iter_dataset(grain.ReadOptions(num_threads=0))
        .mp_prefetch(options)
    )
    with closing(iter(dataset)) as rest:
        rest.start_prefetch()
        # Here, so that the first step is compiled while the workers start.
        yield _gather_one(host, steps.start)
        yield from rest


def _gather_one(host: HostBatches, step: int) -> list[_Arrays]:
    return host.gather(range(step, step + 1))


def make_ahead(items: Generator[_T, None, None], count: int) -> Generator[_T, None, None]:
    """The items of a generator, of which a thread of its own makes some ahead."""
    if count == 0:
        with closing(items):
            yield from items
        return
    made: queue.SimpleQueue[tuple[_T] | BaseException | None] = queue.SimpleQueue()
    free = threading.Semaphore(count - 1)
    closed = threading.Event()

    def work() -> None:
        try:
            with closing(items):
                for item in items:
                    made.put((item,))
                    free.acquire()
                    if closed.is_set():
                        return
        except BaseException as error:
            made.put(error)
        else:
            made.put(None)

    # A process does not wait for a daemon, which a source may block.
    thread = threading.Thread(target=work, name="eqxshard-batches", daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            free.release()
            yield item[0]
    finally:
        closed.set()
        free.release()
        # The garbage collector may run this in that very thread.
        if threading.current_thread() is not thread:
            thread.join(_CLOSE_SECONDS)


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
