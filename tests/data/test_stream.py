"""Loaders of batches that somebody else makes."""

import itertools
import json
import sys
import threading
from contextlib import closing
from typing import Any

import grain
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
from eqxshard.launch import launch
from eqxshard.sharding import batch_sharding


class Again:
    """Batches that a function makes, from the start each time; with a length, if given."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())


class Passes(Again):
    def __init__(self, make, length):
        super().__init__(make)
        self.length = length

    def __len__(self):
        return self.length


def counting():
    """Batches without end."""
    for number in itertools.count():
        yield {"x": np.full(8, number, np.int32)}


def five():
    """One pass over five batches."""
    return ({"x": np.full(8, number, np.int32)} for number in range(5))


def stream(batches, *, mesh=MESHES[0], **options) -> Any:
    return eqxshard.Loader(batches, mesh=mesh_of(**mesh), **options)


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
    (batch,) = stream(Again(lambda: [{"x": image, "y": [*range(16)]}]), mesh=mesh)
    np.testing.assert_array_equal(batch["x"], image)
    np.testing.assert_array_equal(batch["y"], np.arange(16))
    for array in batch.values():
        assert array.sharding == batch_sharding(mesh_of(**mesh))


class Counting:
    """An iterator with a state, as Grain's have one."""

    def __init__(self, read):
        self.state = {"number": 0}
        self.read = read

    def __next__(self):
        number = self.state["number"]
        self.state["number"] += 1
        self.read.append(number)
        return {"x": np.full(8, number, np.int32)}

    def __iter__(self):
        return self

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_iterator_with_a_state_continues_there(prefetch, capsys):
    read: list[int] = []
    batches = Again(lambda: Counting(read))
    loader = stream(batches, prefetch=prefetch)
    assert firsts(loader, 3) == [0, 1, 2]
    position = json.loads(json.dumps(loader.state()))
    assert position["step"] == 3
    read.clear()
    again = stream(batches, prefetch=prefetch)
    again.restore(position)
    assert firsts(again, 2) == [3, 4] and min(read) == 3
    # The states of the last steps are still known.
    read.clear()
    again.seek(4)
    assert firsts(again, 2) == [4, 5] and min(read) == 4
    assert capsys.readouterr().err == ""


def test_an_iterator_may_go_on_with_the_state_that_it_is_given():
    loader = stream(Again(lambda: Counting([])), prefetch=0)
    firsts(loader, 3)
    for _ in range(2):
        loader.seek(2)
        assert firsts(loader, 3) == [2, 3, 4]


@pytest.mark.parametrize(
    "state, says", [({"of": [{0: 1}]}, "has the key 0"), ({"x": {1, 2}}, "has a set")]
)
def test_a_state_that_json_would_change_is_an_error(state, says):
    class Odd(Counting):
        def get_state(self):
            return state

    loader = stream(Again(lambda: Odd([])))
    firsts(loader, 1)
    with pytest.raises(ValueError, match=f"is not JSON .it {says}"):
        loader.state()


def test_a_map_dataset_of_batches_is_entered_at_any_step():
    read = []

    def make(number):
        read.append(int(number))
        return {"x": np.full(8, number, np.int32)}

    loader = stream(grain.MapDataset.range(10**9).map(make), prefetch=0)
    assert len(loader) == 10**9
    loader.seek(10**6)
    assert firsts(loader, 2) == [10**6, 10**6 + 1] and min(read) == 10**6
    # After an epoch, the dataset says how the next one goes.
    shuffled = grain.MapDataset.range(3).seed(1).shuffle().map(make)
    expected: Any = [shuffled[number] for number in range(6)]
    assert firsts(stream(shuffled), 6) == [int(batch["x"][0]) for batch in expected]


@pytest.mark.parametrize("prefetch", [0, 9])
def test_other_iterables_are_read_again_with_a_word(prefetch, capsys):
    loader = stream(Again(five), prefetch=prefetch)
    with pytest.raises(TypeError, match="this loader has no length"):
        len(loader)
    assert firsts(loader) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""
    loader.seek(3)
    assert firsts(loader) == [3, 4]
    assert "reading 3 batches again" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"ends before that of step 5; call loader"):
        assert firsts(loader) == []


def test_with_a_length_passes_follow_one_another():
    for batches in ([*five()], Passes(five, 5), Passes(counting, 5)):
        loader = stream(batches)
        assert len(loader) == 5
        assert firsts(loader, 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
        loader.seek(8)
        assert firsts(loader, 4) == [3, 4, 0, 1]
        assert firsts(stream(batches, epochs=2)) == [0, 1, 2, 3, 4] * 2


def test_an_epoch_begins_without_reading_those_before_it_again(capsys):
    begun = []

    def one_pass():
        begun.append(len(begun))
        return five()

    loader = stream(Passes(one_pass, 5), prefetch=0)
    for _ in range(4):
        assert firsts(loader, len(loader)) == [0, 1, 2, 3, 4]
    assert begun == [0, 1, 2, 3] and capsys.readouterr().err == ""
    loader.seek(11)
    assert firsts(loader, 1) == [1]
    assert "reading a batch again" in capsys.readouterr().err


def test_a_pass_of_another_length_is_an_error():
    says = r"ended after 5 batches, and its len\(\) is 7; have"
    with pytest.raises(ValueError, match=says):
        take(stream(Passes(five, 7)))
    for empty in (Passes(list, 7), Again(list), []):
        with pytest.raises(ValueError, match="the dataset has no batches; look at its fil"):
            take(stream(empty))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_iterator_may_use_its_arrays_again(prefetch):
    # Memory that a device could share.
    raw = np.empty(8 * 64 + 64, np.uint8)
    shared = raw[-raw.ctypes.data % 64 :][: 8 * 64].view(np.float32).reshape(8, 16)

    def refilled():
        for number in range(6):
            shared[:] = number
            yield {"x": shared}

    loader = stream(Again(refilled), prefetch=prefetch)
    assert [float(batch["x"][0, 0]) for batch in list(loader)] == [0, 1, 2, 3, 4, 5]


BLOCKED = """
import queue
import numpy as np
import eqxshard

waiting = queue.Queue()
for number in range(4):
    waiting.put({"x": np.full(8, number)})

class Batches:
    def __iter__(self):
        while True:
            yield waiting.get()

mesh = eqxshard.make_mesh()
batches = iter(eqxshard.Loader(Batches(), mesh=mesh))
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
            yield from counting()
        finally:
            closed.set()

    batches = iter(stream(Again(environment), prefetch=prefetch))
    next(batches)
    assert not closed.is_set()
    batches.close()
    assert closed.wait(60)


def test_a_dataset_that_goes_on_for_ever_is_not_evaluated(unannotated):
    dataset = grain.MapDataset.source([*five()]).repeat()
    step: Any = lambda model, batch: None  # noqa: E731
    with pytest.raises(ValueError, match="evaluate needs a loader with an end, and"):
        eqxshard.evaluate(None, step, stream(dataset))


@pytest.mark.slow
def test_fit_and_evaluate_take_it_and_resume():
    optim, rule, mesh = lenient(optax.adam(1e-2)), RULES["replicate"], make_mesh()
    train_step = eqxshard.make_train_step(squared_errors, optim, mesh=mesh, rule=rule)
    eval_step = eqxshard.make_eval_step(
        lambda model, batch: {"y": batch["y"][:, 0]}, mesh=mesh, rule=rule
    )

    batches = [make_batch(seed=number) for number in range(3)]

    def train(*stops):
        key = jax.random.key(0)
        state = eqxshard.init_state(Model, optim, key=key, mesh=mesh, rule=rule)
        for steps in stops:
            loader = eqxshard.Loader(batches, mesh=mesh)
            state = eqxshard.fit(state, train_step, loader, steps=steps)
        return state

    state = train(4, 7)
    assert_equal(state, train(7))
    tests = eqxshard.Loader(batches, mesh=mesh)
    values = eqxshard.evaluate(state.model, eval_step, tests)
    expected = np.mean([make_batch(seed=i)["y"][:, 0] for i in range(3)])
    assert values["y"] == pytest.approx(expected, rel=1e-5)


PROCESSES = """
import grain, jax, numpy as np
import eqxshard

eqxshard.initialize()
mesh, number = eqxshard.make_mesh(), jax.process_index()

def check(batch, expected):
    for name, array in batch.items():
        assert array.shape == expected[name].shape
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])

def batch(step):
    return {"x": np.arange(4) + 4 * number + 10 * step}

loader = eqxshard.Loader(grain.MapDataset.range(10).map(batch), mesh=mesh)
loader.seek(2)
check(next(iter(loader)), {"x": np.arange(8) + 20})

def draw(example, rng):
    return {**example, "draw": rng.normal()}

source = eqxshard.data.ArraySource({"x": np.arange(20)})
examples = grain.MapDataset.range(20).seed(3).shuffle().map(lambda i: {"x": i})
local = eqxshard.make_mesh(devices=jax.local_devices())
for data in (source, examples.random_map(draw)):
    alone = eqxshard.Loader(data, batch_size=8, mesh=local, epochs=1)
    ours = eqxshard.Loader(data, batch_size=8, mesh=mesh, epochs=1)
    for batch, other in zip(ours, alone, strict=True):
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

try:
    eqxshard.Loader(examples[number::2], batch_size=8, mesh=mesh)
except ValueError as error:
    print(error)

def broken(example):
    raise KeyError("example 0 is broken")

try:
    eqxshard.Loader(examples.map(broken), batch_size=8, mesh=mesh)
except (KeyError, ValueError) as error:
    print(type(error).__name__, error)

failing = [{"x": np.ones(4)}] if number == 0 else [{"x": "text"}]
try:
    eqxshard.Loader(failing, mesh=mesh).shapes()
except (TypeError, ValueError) as error:
    print(error)

uneven = eqxshard.Loader([{"x": np.arange(4 + 4 * number)}], mesh=mesh)
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
    assert out.count("KeyError 'example 0 is broken'") == 1, out
    assert out.count("UsageError process 0 could not make its batches: KeyError") == 1, out
    assert out.count("process 1 could not make its batches: Usage") == 1, out
    assert out.count("the dataset is not the same in all processes; give each") == 2, out


def test_batches_of_other_sizes_do_not_go_on():
    def batches(size):
        return grain.MapDataset.range(96).batch(size).map(lambda x: {"x": x})

    loader = stream(batches(8))
    assert read(loader, 2)[1][0] == 8
    state = loader.state()
    again = stream(batches(8))
    again.restore(state)
    assert read(again, 1) == [[*range(16, 24)]]
    says = "have 16 rows, and those before had 8, so .*; make batches of as many"
    with pytest.raises(ValueError, match="RangeMapDataset of 96"):
        stream(batches(16)).restore(state)
    wide = stream([{"x": np.arange(16)}] * 6)
    wide.restore(stream([{"x": np.arange(8)}] * 12).state() | {"step": 1, "rows": 8})
    with pytest.raises(ValueError, match=says):
        take(wide, 1)


def test_a_position_of_another_pipeline_is_an_error():
    def batches():
        examples = grain.MapDataset.range(96).seed(0).shuffle().map(lambda x: {"x": x})
        kept = examples.to_iter_dataset().filter(lambda entries: entries["x"] % 2 == 0)
        return kept.batch(8, drop_remainder=True)

    loader = stream(batches())
    third = read(loader, 3)[2]
    loader.seek(2)
    state = json.loads(json.dumps(loader.state()))
    again = stream(batches())
    again.restore(state)
    assert read(again, 1) == [third]
    longer = grain.MapDataset.range(97).map(lambda x: {"x": x}).to_iter_dataset()
    for other in (batches().filter(lambda batch: True), longer.batch(8)):
        with pytest.raises(ValueError, match=r"a dataset made of .*, and this one is"):
            stream(other).restore(state)
    with pytest.raises(ValueError, match="workers was 0 and is 2; make the loader as it"):
        stream(batches(), workers=2).restore(state)


# Mistakes


@pytest.mark.parametrize(
    "batches, error, says",
    [
        ([(1, 2)], TypeError, "gave a tuple for a batch; give dicts of arrays by name"),
        ([{"x": np.full(8, 2**40)}], ValueError, "'x' has integers from 0 to"),
        ([{"x": np.ones(8), "y": np.ones(7)}], ValueError, "give all arrays"),
        ([{"x": np.ones(())}], ValueError, "give all arrays"),
        (grain.MapDataset.range(4).batch(8, drop_remainder=True), ValueError, "no batches"),
        ([{"x": np.ones(12)}], ValueError, "batch size 12 does not divide over data=8"),
        (
            [{"x": np.ones(8)}] * 2 + [{"x": np.ones(5)}],
            ValueError,
            r"batch of step 2 is .* 'x' was float32\[8\] and is float32\[5\]; .*drop_rem",
        ),
    ],
)
def test_batches_that_cannot_be_placed_are_errors(batches, error, says):
    with pytest.raises(error, match=says):
        take(stream(batches, mesh=MESHES[3]))


@pytest.mark.parametrize(
    "batches, options, error, says",
    [
        (five(), {}, TypeError, "a generator can be read only once, .*; give an object"),
        ({"x": np.ones(8)}, {}, TypeError, "of a dict .*; give it batch_size="),
        (3, {}, TypeError, "a int has neither examples nor batches; give"),
        ([], {"seed": 1}, ValueError, "seed= is for arrays, and a list has an order"),
        ([], {"remainder": "drop"}, ValueError, "remainder='drop' is for a loader that m"),
        ([], {"placement": "device"}, ValueError, "placement='device' is for arrays"),
        ([], {"workers": 1}, ValueError, "workers= cannot divide the work of a list"),
        (
            grain.MapDataset.source([*five()]).filter(lambda batch: batch["x"][0] % 2 == 0),
            {},
            ValueError,
            r"not every index of this dataset has a batch, .*; call .to_iter_dataset\(",
        ),
        (Again(five), {"epochs": 2}, ValueError, "epochs=2 is for datasets that have a l"),
        ([], {"prefetch": -1}, ValueError, "prefetch=-1 must be at least 0"),
    ],
)
def test_invalid_options_are_errors(batches, options, error, says, unannotated):
    with pytest.raises(error, match=says):
        stream(batches, **options)
