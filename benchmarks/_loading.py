"""Shared by the benchmarks of loaders: other libraries' loaders, and how to time one."""

import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grain
import jax
from _side_by_side import Contest, take_turns
from absl import flags

BATCH_SIZE = 256

#: An endless iterator of batches with a `close` method.
Batches = Any
#: Functions by name, the baseline first. Each turn makes a new iterator of batches.
Contestants = dict[str, Callable[[], Batches]]


def with_grain(
    source: Any,
    prepare: Callable[[grain.MapDataset], grain.MapDataset] = lambda records: records,
    workers: int = 0,
    batch_size: int = BATCH_SIZE,
    options: grain.ReadOptions | None = None,
) -> Batches:
    records = prepare(grain.MapDataset.source(source).seed(0).shuffle())
    dataset = records.repeat().batch(batch_size).to_iter_dataset(options)
    if workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(dataset)


def with_torch(
    dataset: Any, workers: int = 0, batch_size: int = BATCH_SIZE, **options: Any
) -> Batches:
    data = importlib.import_module("torch.utils.data")
    if workers:
        # Not forked from this process, because JAX has threads.
        options |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
    loader = data.DataLoader(
        dataset, batch_size, shuffle=True, drop_last=True, num_workers=workers, **options
    )
    while True:
        yield from loader


def prepare_for_workers() -> None:
    """Get this process ready for the workers of loaders."""
    # Grain's workers read absl flags, which must have been parsed.
    flags.FLAGS.mark_as_parsed()
    if importlib.util.find_spec("torch"):
        # Imported once by the fork server, so that workers start quickly.
        multiprocessing.set_forkserver_preload(["__main__", "torch"])
    else:
        print("PyTorch is not installed; it is left out.")


def compare(
    title: str, contestants: Contestants, *, seconds: float, warmup: int, rounds: int
) -> Contest:
    """Let loaders take turns of some seconds each.

    The first `warmup` batches of a turn are not measured; some were made ahead during
    startup, so there must be more of them than are made ahead.
    """
    turns = {
        name: partial(batches_per_second, make, seconds, warmup)
        for name, make in contestants.items()
    }
    return Contest(title, "batches/s", take_turns(turns, rounds))


def batches_per_second(make: Callable[[], Batches], seconds: float, warmup: int) -> float:
    batches = make()
    batch: Any = None
    for _ in range(warmup):
        batch = next(batches)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        count += 1
    jax.block_until_ready(batch)
    elapsed = time.perf_counter() - start
    batches.close()
    del batches
    wait_until_quiet()
    return count / elapsed


def wait_until_quiet() -> None:
    """Wait until the contestant's workers and threads are idle, before the next turn."""
    while multiprocessing.active_children():
        time.sleep(0.01)
    quiet = False
    # Not until all threads have ended: some of Grain's stay alive, idle.
    while not quiet:
        start, used = time.perf_counter(), time.process_time()
        time.sleep(0.02)
        quiet = time.process_time() - used < 0.1 * (time.perf_counter() - start)
