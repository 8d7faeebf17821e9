"""Runs killed and resumed in the middle of an epoch, on each kind of data."""

import functools
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from data_run import BATCH, EXAMPLES, STEPS, make_loader, mixed, packed, read_in
from fit_helpers import new_state, train_step
from grades import graded
from hypothesis import given
from hypothesis import strategies as st
from loader_helpers import MESHES, loader_of, mesh_of, numbers, read, rows, take
from loop_helpers import Recorder
from process_helpers import finished
from run_helpers import measured

import eqxshard

_ = train_step  # A fixture.
SCRIPT = Path(__file__).parents[1] / "data_run.py"
SETTINGS = {**os.environ, "JAX_PLATFORMS": "cpu"}
WAYS = ("arrays", "mix", "packed")


# Runs that are killed


def launched(folder, way, *options, processes):
    """The status of a run of several processes, of four devices in all, and its output."""
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "eqxshard.launch", f"--processes={processes}"),
        *(f"--devices-per-process={4 // processes}", SCRIPT, folder, f"--way={way}"),
    ]
    settings = SETTINGS | {"EQXSHARD_WAIT_SECONDS": "120"}
    status, out, err = finished([*command, *options], env=settings)
    return status, out + err


def go(folder, way, *options, processes, says, status=0):
    """A run that ends with a status, and says something."""
    found, out = launched(folder, way, *options, processes=processes)
    assert found == status and says in out, out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By kind of data and number of processes, a run that nothing has disturbed."""

    @functools.cache
    def make(way, processes):
        folder = tmp_path_factory.mktemp("whole")
        go(folder, way, processes=processes, says="from step 0")
        return folder

    return make


def parameters_of(folder):
    with np.load(folder / "end.npz") as file:
        return [file[name] for name in file.files]


def assert_same_run(folder, other, rtol=0.0):
    """The same examples in each batch, and the same losses and parameters."""
    assert read_in(folder) == read_in(other)
    ours, theirs = measured(folder), measured(other)
    assert [line["step"] for line in ours] == [*range(1, STEPS + 1)]
    for line, expected in zip(ours, theirs, strict=True):
        assert line == pytest.approx(expected, rel=rtol, abs=0)
    for array, expected in zip(parameters_of(folder), parameters_of(other), strict=True):
        np.testing.assert_allclose(array, expected, rtol, rtol)


def by_epochs(order, length, size=BATCH):
    """Endless batches of an order, of which none has examples of two epochs."""
    for epoch in itertools.count():
        for first in range(0, length, size):
            last = min(first + size, length)
            yield [order(epoch * length + n) for n in range(first, last)]


def by_hand(way, processes=1):
    """The examples of a run's batches, as Grain itself gives them."""
    if way == "mix":
        examples = mixed()
        batches = by_epochs(lambda n: int(examples[n]["index"]), len(examples))
        return [*itertools.islice(batches, STEPS)]
    iterators = [iter(packed(p, processes, BATCH // processes)) for p in range(processes)]
    steps = [[next(iterator)["tokens"] for iterator in iterators] for _ in range(STEPS)]
    return [np.concatenate(parts).tolist() for parts in steps]


def assert_read_once(folder, way, processes=1):
    """The batches are the expected ones, and have no example twice in an epoch."""
    batches = read_in(folder)
    if way == "arrays":
        epochs = [batches[i : i + 7] for i in range(0, STEPS, 7)]
        for epoch in epochs[:-1]:
            assert sorted(itertools.chain(*epoch)) == [*range(EXAMPLES)]
        return
    assert batches == by_hand(way, processes)
    if way == "packed":
        tokens, counts = np.unique(np.concatenate(batches), return_counts=True)
        # Zeros are padding; the tokens say how many each document has.
        assert ((1 + (tokens - 1) % 5) == counts)[1:].all()
        assert 2 not in counts[1:] and len(tokens) > 200


@pytest.mark.versions
@pytest.mark.parametrize("way", graded(WAYS, quick=["mix"], slow=WAYS))
def test_a_killed_run_ends_as_the_whole_one(tmp_path, way):
    """The second epoch has three batches when the process is killed, one of them saved."""
    command = [sys.executable, SCRIPT, tmp_path, f"--way={way}", "--forked", "--kill=10"]
    status, out, err = finished(command, env=SETTINGS)
    assert status == 0, out + err
    starts = [line.split(" in ")[0] for line in out.splitlines() if "from step" in line]
    assert starts == ["from step 0", "from step 0", "from step 8"]
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert_read_once(tmp_path / "killed", way)


@pytest.mark.parametrize(
    "way, processes",
    graded(itertools.product(WAYS, [2, 4]), slow=[*((way, 2) for way in WAYS), ("mix", 4)]),
)
def test_of_several_processes_one_is_killed(tmp_path, whole, way, processes):
    how = {"processes": processes}
    go(tmp_path, way, "--kill=10", **how, says="was killed by SIGKILL", status=137)
    go(tmp_path, way, **how, says=f"from step 8 in {processes} processes")
    assert_same_run(tmp_path, whole(way, processes))
    assert_read_once(tmp_path, way, processes)


@pytest.mark.parametrize("way", graded(["arrays", "mix"], slow=["mix"]))
def test_from_two_processes_to_one_and_back(tmp_path, whole, way):
    killed = {"says": "was killed by SIGKILL", "status": 137}
    go(tmp_path, way, "--kill=5", processes=2, **killed)
    go(tmp_path, way, "--kill=9", processes=1, **killed)
    go(tmp_path, way, processes=2, says="from step 8 in 2 processes")
    assert_same_run(tmp_path, whole(way, 2), rtol=2e-6)
    assert_read_once(tmp_path, way)


@pytest.mark.slow
def test_batches_of_two_processes_are_not_those_of_one(tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole("packed", 2), folder)
    says = "the batches were made by 2 processes, each from a position of its own, and"
    go(folder, "packed", "--steps=20", processes=1, says=says, status=1)


# Processes that differ


@pytest.mark.slow
@pytest.mark.parametrize("way, less, count", [("dataset", 1, 5), ("iterable", 0, 10)])
def test_a_process_with_fewer_batches_is_an_error_on_all(tmp_path, way, less, count):
    status, out = launched(tmp_path, f"shorter {way}", processes=2)
    assert status == 1, out
    says = f"process {less} has only {count} batches, and process {1 - less} has more; give"
    assert sorted(re.findall(rf"\[(.)\] \S*UsageError: {says}", out)) == ["0", "1"], out
    # The batches that both have are trained on.
    assert len(read_in(tmp_path)) == count


@pytest.mark.slow
def test_an_exception_in_the_iterable_of_one_process_ends_all(tmp_path):
    status, out = launched(tmp_path, "failing iterable", processes=2)
    assert status == 1, out
    assert "[1] RuntimeError: a bad file" in out
    says = r"\[0\] \S*UsageError: process 1 could not make its batches: .*a bad file"
    assert re.search(says, out), out


# Loops of one's own


class Passes:
    """A stream of batches without a state."""

    def __iter__(self):
        for step in range(40):
            numbers = np.arange(BATCH * step, BATCH * (step + 1), dtype=np.int32)
            yield {"x": np.ones((BATCH, 8), np.float32), "index": numbers}


class Counting:
    """An iterator of somebody's own, which can be set."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        return Position()


class Position:
    """The number of the next batch."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.step += 1
        return {"index": np.full(BATCH, self.step - 1, np.int32)}

    def get_state(self):
        return {"at": self.step}

    def set_state(self, state):
        self.step = state["at"]


def batched(**options):
    """Batches of a dataset with random access."""
    return eqxshard.Loader(mixed().batch(BATCH, drop_remainder=True), **options)


LOADERS: dict[str, Any] = {
    **{way: functools.partial(make_loader, way) for way in WAYS},
    "device": functools.partial(make_loader, "arrays", placement="device"),
    "no thread": functools.partial(make_loader, "mix", prefetch=0),
    "batched": batched,
    "iterable": lambda **options: eqxshard.Loader(Passes(), **options),
    "own state": lambda **options: eqxshard.Loader(Counting(), **options),
}


def loader_by(kind):
    return LOADERS[kind](mesh=mesh_of(count=1))


def contents(batch):
    """The examples of a batch, or its tokens."""
    name = "index" if "index" in batch else "tokens"
    return rows({**batch, "x": batch[name]})


def next_of(batches, count):
    return [contents(batch) for batch in itertools.islice(batches, count)]


OF_EACH_WAY = ["arrays", "mix", "device", "iterable", "own state"]


@pytest.mark.parametrize("kind", graded(LOADERS, OF_EACH_WAY, LOADERS))
def test_an_own_loop_goes_on_with_the_batch_that_was_next(tmp_path, train_step, kind):
    """Its steps take two batches, and skip every fifth."""
    with closing(iter(loader_by(kind))) as batches:
        expected = next_of(batches, 20)
    batch = {"x": np.ones((8, 8), np.float32), "y": np.ones((8, 4), np.float32)}
    checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=9)
    loader, state = loader_by(kind), new_state()
    with closing(iter(loader)) as batches:
        for step in range(3):
            count = 3 if step == 1 else 2
            assert len(next_of(batches, count)) == count
            state, _ = train_step(state, batch)
            checkpointer.save(state, loader=loader)
    checkpointer.wait()
    for step, taken in ((1, 2), (2, 5), (3, 7)):
        again = loader_by(kind)
        again.restore(checkpointer.description(step)["loader"])
        with closing(iter(again)) as batches:
            assert next_of(batches, 3) == expected[taken:][:3]
        # One that was resumed is saved again.
        last = loader_by(kind)
        last.restore(json.loads(json.dumps(again.state())))
        with closing(iter(last)) as batches:
            assert next_of(batches, 2) == expected[taken + 3 :][:2]


@pytest.mark.parametrize("kind", graded(LOADERS, OF_EACH_WAY, LOADERS))
def test_an_iterator_keeps_its_position_while_its_loader_is_restored(kind):
    with closing(iter(loader_by(kind))) as batches:
        expected = next_of(batches, 12)
    other = loader_by(kind)
    with closing(iter(other)) as batches:
        next_of(batches, 6)
    loader = loader_by(kind)
    with closing(iter(loader)) as alive, closing(iter(loader)) as unread:
        assert next_of(alive, 2) == expected[:2]
        loader.restore(other.state())
        assert next_of(alive, 3) == expected[2:5]
        assert next_of(unread, 2) == expected[:2]
        loader.restore(other.state())
        with closing(iter(loader)) as moved:
            assert next_of(moved, 2) == expected[6:8]
            assert next_of(alive, 2) == expected[5:7]
            assert next_of(moved, 2) == expected[8:10]


def test_an_iterable_without_a_state_is_advanced_with_a_word(capfd):
    loader = loader_by("iterable")
    assert len(next_of(iter(loader), 3)) == 3
    capfd.readouterr()
    again = loader_by("iterable")
    again.restore(loader.state())
    assert next_of(iter(again), 1) == [[*range(24, 32)]]
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "3 batches" in err


# Other batch sizes


def walk(order, length, changes, *, drop):
    """By hand: the batches, and after how many an epoch has ended."""
    batches, ends = [], []
    epochs = itertools.count()

    def next_epoch():
        epoch = next(epochs)
        return [order(epoch * length + n) for n in range(length)]

    left = next_epoch()
    for count, size in changes:
        for _ in range(count):
            if drop and len(left) < size:
                # The batch size has grown since the last batch.
                left = next_epoch()
            batches.append(left[:size])
            left = left[size:]
            if not left or (drop and len(left) < size):
                ends.append(len(batches))
                left = next_epoch()
    return batches, ends


def examples_of(kind, length) -> tuple[Any, Callable[[int], int]]:
    """A source, and the number of the example that comes n-th in a run."""
    if kind == "arrays":
        one = loader_of(numbers(length), batch_size=1)
        return numbers(length), lambda n: int(one.rows(n)[0])
    dataset = grain.MapDataset.range(length).seed(5).shuffle()
    dataset = dataset.map(lambda number: {"x": np.int32(number)})
    return dataset, lambda n: n


@pytest.mark.parametrize("kind", graded(["arrays", "dataset"], ["arrays"], ["dataset"]))
@given(
    length=st.integers(9, 60),
    changes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=2),
    drop=st.booleans(),
)
def test_the_order_goes_on_whatever_the_batch_sizes(kind, length, changes, drop):
    source, order = examples_of(kind, length)
    # A size that takes no step leaves no trace.
    changes = [*((count, size) for count, size in changes if count), (5, 4)]
    expected, ends = walk(order, length, changes, drop=drop)
    options: dict[str, Any] = {"remainder": "drop" if drop else "pad"}
    found: list[list[int]] = []
    state: dict[str, Any] = {}
    step = 0
    for count, size in changes:
        loader = loader_of(source, batch_size=size, **options)
        if state:
            loader.restore(json.loads(json.dumps(state)))
        found += [loader.rows(each).tolist() for each in range(step, step + count)]
        step += count
        loader.seek(step)
        state = loader.state()
        assert state["step"] == step
        steps = loader.steps
        assert steps is not None
        # It knows the epochs of its own batches.
        own = [each for each in range(step - count + 1, step + 1) if steps.ends_epoch(each)]
        assert own == [end for end in ends if step - count < end <= step]
    assert found == expected
    again = loader_of(source, batch_size=4, **options)
    again.restore(state)
    assert again.state() == state


class Seen:
    """A step that collects the examples of its batches."""

    def __init__(self, step):
        self.step = step
        self.batches: list[list[int]] = []

    def __call__(self, state, batch):
        self.batches.append(contents(batch))
        return self.step(state, {**batch, "y": batch["x"][:, :4]})


@pytest.mark.parametrize("way", graded(["arrays", "mix"], ["arrays"], ["mix"]))
def test_each_example_comes_once_where_the_batch_size_changes(tmp_path, train_step, way):
    def go_on(batch_size, **until):
        state = new_state()
        checkpointer = eqxshard.Checkpointer(tmp_path, max_to_keep=9)
        if checkpointer.steps():
            state = checkpointer.restore(state)
        loader = make_loader(way, batch_size, mesh=mesh_of(count=8))
        seen, recorder, evaluated = Seen(train_step), Recorder(), []
        eqxshard.fit(
            state,
            seen,
            loader,
            evaluate=lambda model: evaluated.append(1) or {"x": 1.0},
            checkpointer=checkpointer,
            trackers=[recorder],
            log_every=100,
            **until,
        )
        epochs = {step: values["epoch"] for step, values in recorder.lines}
        return seen.batches, epochs, len(evaluated)

    # Of the 50 examples, or 52, 32 are read; then all of the first epoch, and 24.
    first, epochs, evaluations = go_on(16, steps=2)
    assert 0 < epochs[2] < 1 and evaluations == 1
    second, epochs, evaluations = go_on(8, steps=8)
    assert epochs[5] == 1 and 1 < epochs[8] < 2 and evaluations == 2
    third, epochs, evaluations = go_on(16, epochs=3)
    assert (epochs[10], epochs[14]) == (2, 3) and evaluations == 2
    one = make_loader(way, 1, mesh=mesh_of(count=1))
    length = len(one)
    sizes = [16, 16, 8, 8, length - 48, 8, 8, 8, 16, length - 40, 16, 16, 16, length - 48]
    batches = first + second + third
    assert [len(batch) for batch in batches] == sizes
    order = [*itertools.chain(*batches)]
    assert order == [*itertools.chain(*next_of(iter(one), 3 * length))]
    epochs = [order[first : first + length] for first in range(0, 3 * length, length)]
    assert all(len({*epoch}) == length for epoch in epochs)


def test_padding_that_only_the_changed_epoch_needs_has_weights():
    source = numbers(48)
    loader = loader_of(source)
    assert "__weight__" not in take(loader, 1)[0]
    # 40 are left.
    state = loader.state()
    loader = loader_of(source, batch_size=16)
    loader.restore(state)
    assert "__weight__" in loader.shapes()
    batches = take(loader, 4)
    assert [len(rows(batch)) for batch in batches] == [16, 16, 8, 16]
    assert all("__weight__" in batch for batch in batches)


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[4]])
def test_batches_on_the_devices_change_their_size_alike(mesh):
    source = numbers(50)
    first = loader_of(source)
    read(first, 2)
    found = {}
    for placement in ("host", "device"):
        loader = loader_of(source, batch_size=16, mesh=mesh, placement=placement, epochs=2)
        loader.restore(first.state())
        step = loader.state()["step"]
        batches = take(loader)
        assert [len(rows(batch)) for batch in batches] == [16, 16, 2, 16, 16, 16, 2]
        assert all(batch["x"].shape == (16,) for batch in batches)
        expected = [loader.rows(step + i).tolist() for i in range(len(batches))]
        found[placement] = [rows(batch) for batch in batches]
        assert found[placement] == expected
    assert found["host"] == found["device"]


def test_a_loader_goes_anywhere_from_where_it_was_restored():
    first = loader_of(numbers(64))
    expected = read(first, 8)
    first.seek(2)
    loader = loader_of(numbers(64), batch_size=16)
    loader.restore(first.state())
    for before in (loader.seek, loader.rows, loader.state):
        with pytest.raises(ValueError, match="step 1 is before step 2"):
            before(1)
    assert loader.rows(0).tolist() == expected[0] + expected[1]
    loader.seek(3)
    assert read(loader, 1) == [expected[4] + expected[5]]
    loader.seek(0)
    assert read(loader, 1) == [expected[0] + expected[1]]


# States that do not suit


def test_the_state_of_other_data_is_refused():
    state = loader_of(numbers(64)).state()
    with pytest.raises(ValueError, match="seed was 0 and is 1; make"):
        loader_of(numbers(64), seed=1).restore(state)
    with pytest.raises(ValueError, match="length was 64 and is 60; make"):
        loader_of(numbers(60)).restore(state)
    dataset, _ = examples_of("dataset", 64)
    state = loader_of(dataset).state()
    loader_of(dataset, batch_size=16).restore(state)
    other = dataset.map(lambda example: {"x": example["x"] + np.int32(1)})
    with pytest.raises(ValueError, match="examples"):
        loader_of(other).restore(state)
    of_batches = eqxshard.Loader(dataset.batch(8), mesh=mesh_of(count=1)).state()
    with pytest.raises(
        ValueError, match=r"of an iterable of batches, and this is one of a "
    ):
        loader_of(dataset).restore(of_batches)
    with pytest.raises(
        ValueError, match=r"of arrays, and this is one of a grain\.MapDatas"
    ):
        loader_of(dataset).restore(loader_of(numbers(64)).state())
    with pytest.raises(ValueError, match="epoch 0 over"):
        error = loader_of(numbers(64), remainder="error")
        read(error, 1)
        loader_of(numbers(64), remainder="error", batch_size=16).restore(error.state())


@pytest.mark.parametrize(
    "changes",
    [{"step": "a"}, {"examples": None}, {"examples": -8}, {"fingerprint": 3}, {"step": -1}],
)
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_invalid_states_are_an_error(kind, changes):
    source, _ = examples_of(kind, 64)
    with pytest.raises(ValueError, match="is not the state of a loader; give"):
        loader_of(source).restore({**loader_of(source).state(), **changes})
