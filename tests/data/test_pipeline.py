import json
import math
import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import grain
import numpy as np
import pytest
from loader_helpers import (
    MESHES,
    assert_threads_end,
    flat,
    loader_of,
    loader_threads,
    mesh_of,
    numbers,
    read,
    rows,
    take,
)

import eqxshard
from eqxshard.sharding import batch_sharding

# Batches on devices


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_gets_only_its_own_rows(mesh):
    image = np.arange(32 * 6, dtype=np.float32).reshape(32, 2, 3)
    source = eqxshard.data.ArraySource({"x": image})
    loader = loader_of(source, mesh=mesh, batch_size=16, shuffle=False)
    with closing(iter(loader)) as batches:
        batch = next(batches)
    parts = math.prod(mesh_of(**mesh).shape[axis] for axis in ("data", "fsdp"))
    for array in batch.values():
        assert array.committed
        assert array.sharding == batch_sharding(mesh_of(**mesh))
        assert {shard.data.shape[0] for shard in array.addressable_shards} == {16 // parts}
    for shard in batch["x"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), image[:16][shard.index])


# Threads


@pytest.mark.parametrize("end", ["last", "close", "drop", "raise"])
def test_the_thread_ends_with_its_iterator(end):
    # Threads of earlier tests may take a moment to end.
    assert_threads_end()
    epochs = 1 if end == "last" else None
    batches = iter(loader_of(numbers(64), transform=dict, epochs=epochs))
    assert not loader_threads()
    next(batches)
    assert loader_threads() or end == "last"
    if end == "last":
        list(batches)
    elif end == "close":
        batches.close()
    elif end == "raise":
        with pytest.raises(RuntimeError):
            batches.throw(RuntimeError())
    else:
        del batches
    assert_threads_end()


def test_without_prefetch_there_is_no_thread_and_nothing_is_gathered_early():
    gathered = []

    def transform(batch):
        gathered.append(threading.current_thread())
        return batch

    with closing(iter(loader_of(numbers(64), transform=transform, prefetch=0))) as batches:
        for count in range(1, 6):
            next(batches)
            assert gathered == [threading.main_thread()] * count


def test_a_thread_reads_arrays_ahead_but_not_datasets_that_grain_reads():
    on_demand = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    examples = grain.MapDataset.range(64).map(lambda number: {"x": np.int32(number)})
    batched = examples.batch(8).to_iter_dataset(on_demand)
    loaders = [
        (loader_of(numbers(64), shuffle=False), 1),
        (eqxshard.Loader(batched, mesh=mesh_of(count=1)), 0),
    ]
    for loader, threads in loaders:
        with closing(iter(loader)) as batches:
            assert rows(next(batches)) == [*range(8)]
            assert len(loader_threads()) == threads
        assert_threads_end()


@pytest.mark.versions
@pytest.mark.parametrize(
    ("row_bytes", "prefetch", "calls"),
    [
        # Batches of 2 MiB: one per call.
        (2**18, 1, 1 + 1),
        (2**18, 5, 1 + 5),
        # Batches of 128 KiB: after the first, 16 per call.
        (2**14, 2, 1 + 2),
    ],
)
def test_batches_are_gathered_ahead_while_the_caller_computes(row_bytes, prefetch, calls):
    gathered = threading.Semaphore(0)

    class Large:
        def __len__(self):
            return 2**20

        def gather(self, indices):
            gathered.release()
            return {"x": np.zeros((len(indices), row_bytes), np.uint8)}

    with closing(iter(loader_of(Large(), prefetch=prefetch))) as batches:
        next(batches)
        for _ in range(calls):
            assert gathered.acquire(timeout=60)
        assert not gathered.acquire(timeout=0.05)


def test_errors_of_the_source_reach_the_caller():
    class Damaged:
        def __len__(self):
            return 512

        def gather(self, indices):
            if 500 in indices:
                raise KeyError("example 500")
            return {"x": indices}

    with pytest.raises(KeyError, match="example 500"):
        list(loader_of(Damaged(), shuffle=False))
    assert_threads_end()


PROGRAM = """
import os, signal, threading, time
import jax, numpy as np
import eqxshard

class Slow:
    def __len__(self):
        return 1000

    def gather(self, indices):
        time.sleep(0.2)
        return {"x": indices.astype(np.int32)}

loader = eqxshard.Loader(Slow(), batch_size=8, mesh=eqxshard.make_mesh())
assert threading.enumerate() == [threading.main_thread()]
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_program_ends_even_if_iterators_are_open():
    """And its first step does not wait for Grain, which takes long to import."""
    program = """
import sys
batches = iter(loader)
next(batches)
print("grain" in sys.modules)
next(batches)
print("grain" in sys.modules)
stream = iter(eqxshard.Loader([{"x": np.ones(8)}], mesh=eqxshard.make_mesh()))
next(stream)
for batch in loader:
    break
"""
    assert run(program) == (0, "False\nTrue\n", "")


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_for_a_batch():
    program = """
received = threading.Event()

def interrupt():
    received.wait()
    time.sleep(0.1)  # By now it waits for the next.
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    for batch in loader:
        received.set()
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run(program) == (0, "interrupted\n", "")


# Worker processes


def example(number):
    return {"x": np.int32(number)}


def draw(entries, generator):
    return {**entries, "draw": generator.normal(size=2)}


def with_process(batch):
    return {**batch, "process": np.full(len(batch["x"]), os.getpid(), np.int32)}


EXAMPLES = grain.MapDataset.range(50).seed(3).shuffle().map(example).random_map(draw)


@pytest.mark.slow
@pytest.mark.parametrize("source", [numbers(50), EXAMPLES], ids=["arrays", "examples"])
@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_workers_make_the_same_batches_in_other_processes(source, remainder):
    options = {"remainder": remainder, "epochs": 2, "transform": with_process}
    here = take(loader_of(source, **options))
    expected = [rows(batch) for batch in here]
    processes = set()
    for batch, other in zip(loader_of(source, **options, workers=2), here, strict=True):
        processes |= set(np.asarray(batch["process"]).tolist())
        for name in {*batch} - {"process"}:
            np.testing.assert_array_equal(batch[name], other[name])
    assert len(processes) == 2 and os.getpid() not in processes
    # From the middle of an epoch; prefetched batches do not count for the position.
    stopped = loader_of(source, **options, workers=2)
    stopped.seek(2)
    assert read(stopped, 3) == expected[2:5]
    resumed = loader_of(source, **options)
    resumed.restore(stopped.state())
    assert read(resumed) == expected[5:]


@pytest.mark.slow
def test_workers_read_batches_of_others_and_keep_their_position():
    batches = EXAMPLES.to_iter_dataset().filter(is_even).batch(8, drop_remainder=True)
    here = read(eqxshard.Loader(batches, mesh=mesh_of(count=1)))
    # Each worker reads, filters and batches a part of the examples.
    loader = eqxshard.Loader(batches, mesh=mesh_of(count=1), workers=2)
    there = read(loader)
    assert len(here) == 3 and all(x % 2 == 0 for x in flat(there))
    loader.seek(0)
    assert read(loader, 1) == there[:1]
    position = json.loads(json.dumps(loader.state()))
    again = eqxshard.Loader(batches, mesh=mesh_of(count=1), workers=2)
    again.restore(position)
    assert read(again) == there[1:]


def is_even(entries):
    return entries["x"] % 2 == 0
