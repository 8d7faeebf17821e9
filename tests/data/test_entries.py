"""Sources and transforms whose batches change in mid-run, and those that end them."""

import itertools
import traceback

import numpy as np
import pytest
from loader_helpers import loader_of, mesh_of, take

import eqxshard


class Changing:
    """A source that is another from its third call on."""

    def __init__(self, change):
        self.change = change
        self.calls = 0

    def __len__(self):
        return 80

    def gather(self, indices):
        self.calls += 1
        batch = {"x": np.ones((len(indices), 3), np.float32), "y": indices}
        return self.change(batch) if self.calls > 2 else batch

    def transform(self, batch):
        return self.gather(batch["x"])


CHANGES = {
    "shape": (lambda b: {**b, "x": b["x"][:, :2]}, r"'x' was float32\[8,3\] and .*\[8,2\]"),
    "dtype": (lambda b: {**b, "x": b["x"].astype(np.float16)}, "32.* and is float16"),
    "missing": (lambda b: {"x": b["x"]}, "'y' is missing; return"),
    "new": (lambda b: {**b, "z": b["y"]}, "'z' is new; return the same entries"),
}


@pytest.mark.parametrize("change, says", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_another_batch_than_the_first_is_an_error(change, says, prefetch):
    source = Changing(change)
    numbers = eqxshard.data.ArraySource({"x": np.arange(80)})
    for loader in (
        loader_of(numbers, transform=source.transform, prefetch=prefetch),
        loader_of(Changing(change), prefetch=0),
    ):
        with pytest.raises(ValueError, match=f"batch of step 2 is not .* step 0: .*{says}"):
            take(loader)
        # Another iterator does not begin anew either.
        loader.seek(5)
        with pytest.raises(ValueError, match=f"batch of step 5 is .* step 0: .*{says}"):
            take(loader)


def test_what_devices_do_not_tell_apart_is_no_change():
    loader = loader_of(Changing(lambda b: {**b, "y": b["y"].astype(np.int32)}), prefetch=0)
    assert len(take(loader, 12)) == 12


def test_batches_of_others_are_held_to_their_first(unannotated):
    class Batches:
        def __init__(self, source):
            self.source = source

        def __iter__(self):
            return (self.source.gather(np.arange(8)) for _ in itertools.count())

    for change, says in CHANGES.values():
        loader = eqxshard.Loader(Batches(Changing(change)), mesh=mesh_of(count=1))
        with pytest.raises(ValueError, match=says.split(";")[0]):
            take(loader, 5)


def stop(batch):
    return next(iter([]))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stop_iteration_does_not_end_the_batches(prefetch):
    numbers = eqxshard.data.ArraySource({"x": np.arange(80)})
    transform = Changing(stop).transform
    for loader in (
        loader_of(numbers, transform=transform, prefetch=prefetch),
        loader_of(Changing(stop), prefetch=0),
    ):
        with pytest.raises(
            RuntimeError, match=r"test_entries.py raised StopIter.*; give"
        ) as e:
            take(loader)
        cause = e.value.__cause__
        assert cause is not None
        assert traceback.extract_tb(cause.__traceback__)[-1].name == "stop"
