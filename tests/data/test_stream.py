"""Loaders of anybody's batches."""

import itertools
import sys
import threading
from contextlib import closing
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import (
    RULES,
    Model,
    assert_equal,
    lenient,
    make_batch,
    make_mesh,
    squared_errors,
)
from loader_helpers import MESHES, assert_threads_end, mesh_of, read, take
from process_helpers import finished

import eqxshard
from eqxshard.data import from_iterator
from eqxshard.launch import launch
from eqxshard.sharding import batch_sharding


def counting(step):
    """Batches without end, from a step on."""
    for number in itertools.count(step):
        yield {"x": np.full(8, number, np.int32)}


def five():
    """One pass over five batches."""
    return ({"x": np.full(8, number, np.int32)} for number in range(5))


def stream(make_iterator, *, mesh=MESHES[0], **options) -> Any:
    return from_iterator(make_iterator, mesh=mesh_of(**mesh), **options)


def firsts(loader, count=None):
    """The first number of each of the next batches."""
    with closing(iter(loader)) as batches:
        return [int(batch["x"][0]) for batch in itertools.islice(batches, count)]


@pytest.fixture(autouse=True)
def threads_end():
    yield
    assert_threads_end()


@pytest.mark.parametrize("mesh", MESHES[2:5])
def test_batches_are_placed_like_a_loaders(mesh):
    image = np.arange(16 * 6, dtype=np.float32).reshape(16, 2, 3)
    (batch,) = stream(lambda: iter([{"x": image, "y": list(range(16))}]), mesh=mesh)
    np.testing.assert_array_equal(batch["x"], image)
    np.testing.assert_array_equal(batch["y"], np.arange(16))
    for array in batch.values():
        assert array.sharding == batch_sharding(mesh_of(**mesh))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_iterator_that_takes_a_step_continues_there(prefetch):
    loader = stream(counting, prefetch=prefetch)
    assert firsts(loader, 3) == [0, 1, 2]
    assert firsts(loader, 2) == [3, 4]
    loader.seek(10**9)
    assert firsts(loader, 2) == [10**9, 10**9 + 1]
    opened = []

    def one_epoch(step):
        opened.append(step)
        return ({"x": np.full(8, n, np.int32)} for n in range(step, step - step % 5 + 5))

    loader = stream(one_epoch, length=5, prefetch=prefetch)
    loader.seek(8)
    assert firsts(loader, 8) == list(range(8, 16))
    assert opened[:3] == [8, 10, 15]


@pytest.mark.parametrize("prefetch", [0, 9])
def test_other_iterators_skip_batches(prefetch):
    loader = stream(five, prefetch=prefetch)
    assert not hasattr(loader, "__len__")
    assert firsts(loader) == [0, 1, 2, 3, 4]
    loader.seek(3)
    assert firsts(loader) == [3, 4]
    with pytest.warns(UserWarning, match=r"at step 5, .*; call loader\.seek\(0\)"):
        assert firsts(loader) == []


def test_with_a_length_passes_follow_one_another():
    loader = stream(five, length=5)
    assert len(loader) == 5
    assert firsts(loader, 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    loader.seek(8)
    assert firsts(loader, 4) == [3, 4, 0, 1]


@pytest.mark.parametrize("length", [3, 7])
def test_an_iterator_that_ends_within_an_epoch_is_an_error(length):
    loader = stream(five, length=length)
    says = f"before step 5, {5 % length} batches into an epoch of length={length}; give"
    with pytest.raises(ValueError, match=says):
        take(loader)
    with pytest.raises(ValueError, match="the iterator ended before step 0"):
        take(stream(lambda: iter([]), length=length))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_iterator_may_use_its_arrays_again(prefetch):
    # Memory that a device could share.
    raw = np.empty(8 * 64 + 64, np.uint8)
    shared = raw[-raw.ctypes.data % 64 :][: 8 * 64].view(np.float32).reshape(8, 16)

    def refilled():
        for number in range(6):
            shared[:] = number
            yield {"x": shared}

    loader = stream(refilled, prefetch=prefetch)
    assert [float(batch["x"][0, 0]) for batch in list(loader)] == [0, 1, 2, 3, 4, 5]


BLOCKED = """
import queue
import numpy as np
import eqxshard

waiting = queue.Queue()
for number in range(4):
    waiting.put({"x": np.full(8, number)})

def batches():
    while True:
        yield waiting.get()

mesh = eqxshard.make_mesh()
batches = iter(eqxshard.data.from_iterator(batches, mesh=mesh))
for _ in range(3):
    next(batches)
batches.close()
print("leaving")
"""


@pytest.mark.slow
def test_a_process_ends_while_the_iterator_is_blocked():
    status, out, err = finished([sys.executable, "-c", BLOCKED], seconds=60)
    assert (status, out) == (0, "leaving\n"), err


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_iterator_is_closed_with_the_loaders(prefetch):
    closed = threading.Event()

    def environment():
        try:
            yield from counting(0)
        finally:
            closed.set()

    batches = iter(stream(environment, prefetch=prefetch))
    next(batches)
    assert not closed.is_set()
    batches.close()
    assert closed.wait(60)


@pytest.mark.slow
def test_fit_and_evaluate_take_it_and_resume():
    optim, rule, mesh = lenient(optax.adam(1e-2)), RULES["replicate"], make_mesh()
    train_step = eqxshard.make_train_step(squared_errors, optim, mesh=mesh, rule=rule)
    eval_step = eqxshard.make_eval_step(
        lambda model, batch: {"y": batch["y"][:, 0]}, mesh=mesh, rule=rule
    )

    def batches(step):
        return (make_batch(seed=number) for number in range(step, step - step % 3 + 3))

    def train(*stops):
        key = jax.random.key(0)
        state = eqxshard.init_state(Model, optim, key=key, mesh=mesh, rule=rule)
        for steps in stops:
            loader: Any = from_iterator(batches, mesh=mesh, length=3)
            state = eqxshard.fit(state, train_step, loader, steps=steps)
        return state

    state = train(4, 7)
    assert_equal(state, train(7))
    tests: Any = from_iterator(batches, mesh=mesh, length=3)
    values = eqxshard.evaluate(state.model, eval_step, tests)
    expected = np.mean([make_batch(seed=i)["y"][:, 0] for i in range(3)])
    assert values["y"] == pytest.approx(expected, rel=1e-5)


PROCESSES = """
import jax, numpy as np
import eqxshard
from eqxshard.data import RandomTransform, from_iterator

eqxshard.initialize()
mesh, number = eqxshard.make_mesh(), jax.process_index()

def check(batch, expected):
    for name, array in batch.items():
        assert array.shape == expected[name].shape
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])

def batches(step):
    while True:
        yield {"x": np.arange(4) + 4 * number + 10 * step}
        step += 1

loader = from_iterator(batches, mesh=mesh)
loader.seek(2)
check(next(iter(loader)), {"x": np.arange(8) + 20})

def draw(batch, generators):
    return {**batch, "draw": np.array([g.normal() for g in generators])}

source = eqxshard.data.ArraySource({"x": np.arange(20)})
options = {"batch_size": 8, "transform": RandomTransform(draw)}
alone = eqxshard.Loader(
    source, mesh=eqxshard.make_mesh(devices=jax.local_devices()), epochs=1, **options
)
for batch, other in zip(eqxshard.Loader(source, mesh=mesh, **options), alone):
    check(batch, {name: np.asarray(array) for name, array in other.items()})

placed = (
    eqxshard.Loader(source, batch_size=8, mesh=mesh, epochs=1, placement=placement)
    for placement in ("host", "device")
)
for batch, other in zip(*placed, strict=True):
    for name, array in other.items():
        assert batch[name].sharding == array.sharding
        for shard, same in zip(batch[name].addressable_shards, array.addressable_shards):
            np.testing.assert_array_equal(shard.data, same.data)

uneven = from_iterator(lambda: iter([{"x": np.arange(4 + 4 * number)}]), mesh=mesh)
try:
    next(iter(uneven))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_each_process_gives_the_rows_of_its_devices(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(PROCESSES)
    assert launch([str(script)], processes=2, devices_per_process=2) == 0
    out = capsys.readouterr().out
    says = "differ in batch rows: 8 in process 0; 16 in process 1. Start all of them alike"
    assert out.count(says) == 2, out


def test_batches_of_other_sizes_go_on_if_that_is_meant():
    def batches(size, skip=0):
        # As a function of the examples seen.
        return lambda step: iter(
            {"x": np.arange(i, i + size)} for i in itertools.count(skip + step * size, size)
        )

    loader = stream(batches(8))
    assert read(loader, 2)[1][0] == 8
    state = loader.state()
    assert state == {"step": 2, "rows": 8}
    for _ in range(2):
        other = stream(batches(16))
        other.restore(state)
        with pytest.raises(
            ValueError, match=r"step 2 has 16 rows, and .* had 8; make batch"
        ):
            take(other, 1)
    other = stream(batches(16, skip=-16))
    other.restore(state, rebatch=True)
    other.restore(state)
    assert read(other, 1) == [[*range(16, 32)]]
    with pytest.raises(ValueError, match=r"all earlier steps, .*; give the function"):
        stream(five).restore(state, rebatch=True)


# Mistakes


@pytest.mark.parametrize(
    "batches, error, says",
    [
        ([(1, 2)], TypeError, "gave a tuple for step 0; give dicts of arrays by name"),
        ([{"x": np.full(8, 2**40)}], ValueError, "'x' has integers from 0 to"),
        ([{"x": np.ones(8), "y": np.ones(7)}], ValueError, "give all arrays"),
        ([{"x": np.ones(())}], ValueError, "give all arrays"),
        ([{"x": np.ones(12)}], ValueError, "batch size 12 does not divide over data=8"),
        (
            [{"x": np.ones(8)}] * 2 + [{"x": np.ones(5)}],
            ValueError,
            r"batch of step 2 is .* 'x' was float32\[8\] and is float32\[5\]; .*drop_last",
        ),
    ],
)
def test_batches_that_cannot_be_placed_are_errors(batches, error, says):
    with pytest.raises(error, match=says):
        take(stream(lambda: iter(batches), mesh=MESHES[3]))


def test_invalid_options_are_errors(unannotated):
    with pytest.raises(TypeError, match="a generator cannot be started again; give"):
        stream(five())
    with pytest.raises(ValueError, match="length=0 must be at least 1"):
        stream(five, length=0)
    with pytest.raises(ValueError, match="prefetch=-1 must be at least 0"):
        stream(five, prefetch=-1)
    with pytest.raises(ValueError, match="step -1 is before the start"):
        stream(five).seek(-1)
