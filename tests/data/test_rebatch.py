"""A loader that goes on at another batch size, from the same example."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import MESHES, loader_of, numbers, read, rows, take

from eqxshard.data import RandomTransform, WeightedSampler


def moved(loader, *, batch_size, source, **options):
    """A loader of another batch size, where `loader` is."""
    new = loader_of(source, batch_size=batch_size, **options)
    new.restore(json.loads(json.dumps(loader.state())), rebatch=True)
    return new


def epochs_of(source, **options):
    """The order of each epoch, one example at a time."""
    one = loader_of(source, batch_size=1, **options)
    epoch = 0
    while True:
        steps = range(epoch * len(one), (epoch + 1) * len(one))
        yield [int(one.rows(step)[0]) for step in steps]
        epoch += 1


def walk(source, changes, *, drop, **options):
    """By hand: the batches, and after how many an epoch has ended."""
    batches, ends = [], []
    orders = epochs_of(source, **options)
    left = next(orders)
    for count, size in changes:
        for _ in range(count):
            if not left or (drop and len(left) < size):
                if not ends or ends[-1] != len(batches):
                    ends.append(len(batches))
                left = next(orders)
            batches.append(left[:size])
            left = left[size:]
            if not left or (drop and len(left) < size):
                ends.append(len(batches))
                left = next(orders)
    return batches, ends


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(9, 60),
    changes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=2),
    drop=st.booleans(),
    weighted=st.booleans(),
)
def test_the_order_goes_on_whatever_the_batch_sizes(n, changes, drop, weighted):
    source = numbers(n)
    options: dict[str, Any] = {}
    if weighted:
        options["sampler"] = WeightedSampler(np.arange(n) + 1)
    # A size that takes no step leaves no trace.
    changes = [*((count, size) for count, size in changes if count), (5, 4)]
    expected, ends = walk(source, changes, drop=drop, **options)
    options["remainder"] = "drop" if drop else "pad"
    (step, size), *later = changes
    loader = loader_of(source, batch_size=size, **options)
    loader.seek(step)
    for count, size in later:
        loader = moved(loader, batch_size=size, source=source, **options)
        step += count
        loader.seek(step)
    found = [loader.rows(each).tolist() for each in range(step)]
    assert found == expected
    steps = loader.steps
    assert [each for each in range(1, step + 1) if steps.ends_epoch(each)] == ends
    assert [steps.end(epoch + 1) for epoch in range(len(ends))] == ends
    passed = [steps.epochs(each) for each in range(step + 1)]
    assert passed == sorted(passed)
    assert [passed[end] for end in ends] == [*range(1, len(ends) + 1)]
    # As from a checkpoint, without a word.
    again = loader_of(source, batch_size=4, **options)
    again.restore(json.loads(json.dumps(loader.state())))
    assert again.state() == loader.state() and again.steps == steps


DRAW = RandomTransform(
    lambda batch, generators: {
        **batch,
        "draw": np.array([g.integers(2**31) for g in generators], np.int32),
    }
)


@pytest.mark.versions
@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[4]])
def test_the_batches_are_those_of_the_rows(placement, mesh):
    source = numbers(50)
    options: dict[str, Any] = {"placement": placement}
    if placement == "host":
        options["transform"] = DRAW
    first = loader_of(source, **options)
    before = take(first, 2)
    # 16 are seen; two batches of 16 and two examples are left.
    loader = moved(first, batch_size=16, source=source, mesh=mesh, epochs=2, **options)
    step = loader.state()["step"]
    batches = take(loader)
    assert [len(rows(batch)) for batch in batches] == [16, 16, 2, 16, 16, 16, 2]
    assert all(batch["x"].shape == (16,) for batch in batches)
    expected = [loader.rows(step + i).tolist() for i in range(len(batches))]
    assert [rows(batch) for batch in batches] == expected
    seen = [row for batch in [*before, *batches[:3]] for row in rows(batch)]
    assert sorted(seen) == [*range(50)]
    if placement == "host":
        whole = drawn(take(loader_of(source, epochs=1, transform=DRAW)))
        assert drawn([*before, *batches[:3]]) == whole


def drawn(batches):
    pairs = [(rows(batch), np.asarray(batch["draw"])) for batch in batches]
    return {row: int(x) for some, draws in pairs for row, x in zip(some, draws)}


def test_padding_that_only_the_changed_epoch_needs_has_weights():
    source = numbers(48)
    loader = loader_of(source)
    assert "__weight__" not in take(loader, 1)[0]
    # 40 are left.
    loader = moved(loader, batch_size=16, source=source)
    assert "__weight__" in loader.shapes()
    batches = take(loader, 4)
    assert [len(rows(batch)) for batch in batches] == [16, 16, 8, 16]
    assert all("__weight__" in batch for batch in batches)


def test_a_loader_that_was_moved_stays():
    source = numbers(64)
    first = loader_of(source)
    read(first, 2)
    state = first.state()
    with pytest.raises(ValueError, match=r"was 8 and is 16; .*rebatch=True"):
        loader_of(source, batch_size=16).restore(state)
    loader = loader_of(source, batch_size=16)
    loader.restore(state, rebatch=True)
    loader.restore(state)
    assert loader.state()["batch_sizes"] == [[0, 8], [2, 16]]
    with pytest.raises(ValueError, match=r"step 1 is before step 2, .* of 16; make"):
        loader.seek(1)
    # Back again, before a step is taken.
    assert moved(loader, batch_size=8, source=source).state() == state
    with pytest.raises(ValueError, match="batch_size was 16 and is 8"):
        loader_of(source).restore(loader.state())


def test_what_else_differs_is_still_refused():
    loader = loader_of(numbers(64), batch_size=16, seed=1)
    with pytest.raises(ValueError, match="other batches: seed was 0 and is 1; make"):
        loader.restore(loader_of(numbers(64)).state(), rebatch=True)
    first = loader_of(numbers(64), remainder="error")
    read(first, 1)
    loader = loader_of(numbers(64), remainder="error", batch_size=16)
    with pytest.raises(ValueError, match="of 16 leave 8 examples of epoch 0 over, which"):
        loader.restore(first.state(), rebatch=True)
    read(first, 7)
    loader.restore(first.state(), rebatch=True)
    assert len(read(loader, 4)) == 4


@pytest.mark.parametrize(
    "sizes", [None, [], [[1, 8]], [[0, 8], [0, 4]], [[0, -8]], [[0, 8], 3], [["a", 8]]]
)
def test_invalid_sizes_are_an_error(sizes):
    state = loader_of(numbers(64)).state() | {"batch_sizes": sizes}
    with pytest.raises(ValueError, match="is not the state of a loader; give"):
        loader_of(numbers(64)).restore(state)
