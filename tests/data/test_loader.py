import json
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import MESHES, loader_of, numbers, read, rows

import eqxshard

# The position


@pytest.mark.versions
@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 40),
    read_first=st.integers(0, 12),
    prefetch=st.integers(0, 3),
    mesh=st.sampled_from(MESHES),
)
def test_a_restored_loader_continues_with_the_next_batch(n, read_first, prefetch, mesh):
    whole = read(loader_of(numbers(n)), 16)
    stopped = loader_of(numbers(n), prefetch=prefetch)
    read(stopped, read_first)
    state = json.loads(json.dumps(stopped.state()))
    assert state["step"] == read_first
    resumed = loader_of(numbers(n), mesh=mesh, epochs=100)
    resumed.restore(state)
    assert read(resumed, 16 - read_first) == whole[read_first:]


def test_each_slice_of_an_endless_loader_is_an_epoch_in_a_new_order():
    loader = loader_of(numbers(64))
    first, second = ([*islice(loader, len(loader))] for _ in range(2))
    orders = [[row for batch in epoch for row in rows(batch)] for epoch in (first, second)]
    assert [sorted(order) for order in orders] == [[*range(64)]] * 2
    assert orders[0] != orders[1]


def test_iterators_are_independent_and_the_last_to_advance_sets_the_position():
    loader = loader_of(numbers(64), shuffle=False)
    with closing(iter(loader)) as a, closing(iter(loader)) as b:
        assert rows(next(a))[0] == 0
        assert rows(next(a))[0] == 8
        assert rows(next(b))[0] == 0
        assert loader.state()["step"] == 1
        assert rows(next(a))[0] == 16
        assert loader.state()["step"] == 3
        with closing(iter(loader)) as c:
            loader.seek(0)
            assert rows(next(c))[0] == 24
        assert rows(next(b))[0] == 8


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"remainder": "drop"}, "remainder was 'pad' and is 'drop'"),
        ({"seed": 1, "shuffle": False}, "seed was 0 and is 1, shuffle was True and is F"),
        ({"source": numbers(63)}, "length was 64 and is 63"),
    ],
)
def test_the_state_of_another_loader_is_an_error(other, says):
    loader = loader_of(**{"source": numbers(64)} | other)
    with pytest.raises(ValueError, match=says):
        loader.restore(loader_of(numbers(64)).state())
    assert loader.state()["step"] == 0


@pytest.mark.parametrize(
    "state",
    [{}, {"step": 1, "fingerprint": None}, {"step": None, "fingerprint": {}}],
)
def test_an_invalid_state_is_an_error(state, unannotated):
    with pytest.raises(ValueError, match="is not the state of a loader; give"):
        loader_of(numbers(64)).restore(state)


def test_a_loader_that_is_used_up_says_so():
    loader = loader_of(numbers(16), epochs=1, shuffle=False)
    whole = read(loader)
    with pytest.warns(UserWarning, match=r"at step 2, .*; make .* or call loader\.seek"):
        assert list(loader) == []
    loader.seek(0)
    assert read(loader) == whole


# Options


class MapStyle:
    """A dataset as PyTorch's are."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": index}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"batch_size": 0}, ValueError, "batch size 0 is not positive"),
        ({"batch_size": 12, "mesh": MESHES[3]}, ValueError, "does not divide over data=8"),
        ({"epochs": 0}, ValueError, "epochs=0 must be at least 1"),
        ({"prefetch": -1}, ValueError, "prefetch=-1 must be at least 0"),
        ({"seed": 2**32}, ValueError, "seed=4294967296 must be between 0 and"),
        ({"workers": -1}, ValueError, "workers=-1 must be at least 0"),
        ({"remainder": "error"}, ValueError, "batches of 8 leave 2 of 10 examples over"),
        ({"remainder": "drop", "batch_size": 16}, ValueError, "fewer than one batch of 16"),
        ({"remainder": "pda"}, ValueError, "remainder='pda' is not 'pad', 'drop' or"),
        ({"placement": "disk"}, ValueError, "placement='disk' is not 'host' or 'device'"),
        ({"source": numbers(0)}, ValueError, "an epoch has no examples"),
        ({"batch_size": 16.0}, TypeError, "'float' object cannot be interpreted as an int"),
        ({"source": (np.zeros(3), np.zeros(3))}, TypeError, "a tuple is .* a dict of arr"),
        (
            {"source": [{"x": 1}, {"x": 2}]},
            TypeError,
            "a list is not .*MapDataset.source",
        ),
        ({"source": MapStyle()}, TypeError, r"a MapStyle is not .*MapDataset\.source\(it"),
        ({"source": iter([{"x": 1}])}, TypeError, "a list_iterator is .* leave batch_size"),
        ({"source": "x.npz"}, TypeError, "a str is not a dataset of examples; open it"),
        ({"source": 3}, TypeError, r"a int is not a dataset .* gather\(indices\)"),
        ({"read_options": 3}, ValueError, "read_options= is for a grain.MapDataset"),
        ({"source": eqxshard.data.ArraySource}, TypeError, "ArraySource is .* instance"),
    ],
)
def test_invalid_options_are_errors(options, error, says, unannotated):
    with pytest.raises(error, match=says):
        loader_of(**{"source": numbers(10)} | options)


def test_a_mesh_is_not_text(unannotated):
    mesh: Any = "data=8"
    with pytest.raises(TypeError, match="mesh='data=8' is not a mesh; make it with"):
        eqxshard.Loader(numbers(10), batch_size=8, mesh=mesh)


def test_seeking_before_the_start_is_an_error():
    loader = loader_of(numbers(10))
    for before in (loader.seek, loader.rows, loader.state):
        with pytest.raises(ValueError, match="step -1 is before the start"):
            before(-1)
