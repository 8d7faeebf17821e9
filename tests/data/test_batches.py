"""Datasets and batches that no loader can use, each refused in a sentence."""

import re
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
import pytest
from fit_helpers import new_state, train_step
from loader_helpers import assert_threads_end, mesh_of, take

import eqxshard
from eqxshard._errors import ON_PURPOSE

_ = train_step  # A fixture.


@pytest.fixture(autouse=True)
def threads_end():
    yield
    assert_threads_end()


def dataset(make_example: Any, length: int = 20) -> grain.MapDataset:
    return grain.MapDataset.range(length).map(make_example)


def examples(length: int = 20) -> grain.MapDataset:
    """Examples that a loader could use."""
    return dataset(lambda i: {"x": np.ones(3, np.float32), "y": np.int32(i)}, length)


def several(*batches: Any) -> list[Any]:
    """Batches after two that are right."""
    return [{"x": np.ones((8, 3), np.float32)}] * 2 + [*batches]


def changed(**changes: Any) -> dict[str, Any]:
    return {"x": np.ones((8, 3), np.float32), **changes}


class OneShot:
    """An iterator, which cannot start again."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return changed()


def weights(i: int) -> dict[str, Any]:
    return {"x": np.int32(i), "__weight__": np.float32("nan" if i == 5 else 1)}


def large(i: int) -> dict[str, Any]:
    return {"x": np.int64(2**40 + i)}


def ragged(i: int) -> dict[str, Any]:
    return {"x": np.ones(3 + (i == 5), np.float32)}


#: By name: a source, the options of its loader, the error and what it says.
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    # Way 1: arrays.
    "arrays of strings": (
        {"x": np.array(["a"] * 8)},
        {"batch_size": 8},
        TypeError,
        "'x' is a NumPy array of dtype <U1",
    ),
    "arrays with NaN weights": (
        {"x": np.ones(8), "__weight__": np.array([1.0] * 3 + [np.nan] * 5)},
        {"batch_size": 8, "shuffle": False},
        ValueError,
        "'__weight__' is nan, first in row 3; give",
    ),
    "64-bit integers": (
        {"x": np.full(8, 2**40)},
        {"batch_size": 8},
        ValueError,
        f"'x' has integers from .* to {2**40}, which",
    ),
    "arrays without a batch size": (
        {"x": np.ones(8)},
        {},
        TypeError,
        "itself; give it batch_size=",
    ),
    # Way 2: examples.
    "a dataset of strings": (
        grain.MapDataset.source(["a", "b"] * 8),
        {"batch_size": 8},
        TypeError,
        "example 0 of the dataset is a str; make each a dict",
    ),
    "a dataset with an entry of strings": (
        dataset(lambda i: {"name": f"file {i}"}),
        {"batch_size": 8},
        TypeError,
        "'name' is a NumPy array of dtype <U6",
    ),
    "tuples": (
        dataset(lambda i: (np.ones(3), i)),
        {"batch_size": 8},
        TypeError,
        "example 0 of the dataset is a tuple; make each a dict",
    ),
    "ragged examples": (
        dataset(ragged),
        {"batch_size": 8},
        ValueError,
        r"'x' has the shape \(3,\) in example 0 and \(4,\) in example 5; pad",
    ),
    "examples with other entries": (
        dataset(lambda i: {"x" if i < 6 else "y": i}),
        {"batch_size": 8},
        ValueError,
        r"example 6 of the dataset has the entries \['y'\], .* 0 has \['x'\]; give",
    ),
    "a filter before the examples are batched": (
        examples().filter(lambda example: example["y"] > 5),
        {"batch_size": 8},
        ValueError,
        r"\.filter.*to_iter_dataset\(\)\.batch\(n\) on it, and leave batch_size= out",
    ),
    "NaN weights": (
        dataset(weights),
        {"batch_size": 8},
        ValueError,
        "'__weight__' is nan, first in row 5; give",
    ),
    "large integers": (
        dataset(large),
        {"batch_size": 8},
        ValueError,
        f"'x' has integers from .* to {2**40 + 7}, which",
    ),
    "a seed for a dataset": (examples(), {"batch_size": 8, "seed": 1}, ValueError, "seed"),
    "a sampler for a dataset": (
        examples(),
        {"batch_size": 8, "sampler": eqxshard.data.UniformSampler(8)},
        ValueError,
        "sampler",
    ),
    "an empty dataset": (examples(0), {"batch_size": 8}, ValueError, "no examples"),
    # Way 3: batches.
    "an iterator dataset with a batch size": (
        examples().to_iter_dataset(),
        {"batch_size": 8},
        TypeError,
        r"leave batch_size= out; .* make batches with \.batch\(n\)",
    ),
    "batches with a batch size": (several(), {"batch_size": 8}, TypeError, "batch_size="),
    "examples without a batch size": (
        examples(),
        {},
        ValueError,
        r"shapes \{'x': \(3,\), 'y': \(\)\}; .* batch_size= or call \.batch\(n\)",
    ),
    "examples of an iterator dataset": (
        examples().to_iter_dataset(),
        {},
        ValueError,
        r"shapes \{'x': \(3,\), 'y': \(\)\}; .* call \.batch\(n\)",
    ),
    "a generator": (
        (changed() for _ in range(3)),
        {},
        TypeError,
        "a generator can be read only once, .*; give an object whose __iter__",
    ),
    "an iterator": (OneShot(), {}, TypeError, "a OneShot can be read only once, "),
    "a number": (3, {}, TypeError, "a int has neither examples nor batches; give"),
    "a filter that leaves nothing": (
        examples().to_iter_dataset().filter(lambda example: False).batch(8),
        {},
        ValueError,
        "no batch",
    ),
    "a list of no batches": ([], {}, ValueError, "no batch"),
    "batches of tuples": (
        [(np.ones((8, 3)), np.ones(8))],
        {},
        TypeError,
        "the dataset gave a tuple for a batch; give dicts of arrays by name",
    ),
    "batches of strings": (
        dataset(lambda i: {"name": "abc"}).batch(4),
        {},
        TypeError,
        "'name' is a NumPy array of dtype <U3",
    ),
    "a ragged batch": (
        [{"x": [[1.0, 2.0], [3.0]]}],
        {},
        ValueError,
        r"'x' has rows of the shapes \(1,\), \(2,\); pad",
    ),
    "entries of other lengths": (
        [changed(y=np.ones(7))],
        {},
        ValueError,
        r"shapes \{'x': \(8, 3\), 'y': \(7,\)\}; give all arrays",
    ),
    "another batch than the first": (
        several({"x": np.ones((8, 4), np.float32)}),
        {},
        ValueError,
        r"batch of step 2 is not .*'x' was float32\[8,3\] and is float32\[8,4\]",
    ),
    "a last batch with fewer rows": (
        examples(20).to_iter_dataset().batch(8, drop_remainder=False),
        {},
        ValueError,
        r"step 2 is not .*'x' was float32\[8,3\] and is float32\[4,3\], .*; .*drop_rem",
    ),
    "batches that do not divide": (
        [{"x": np.ones((6, 3), np.float32)}],
        {},
        ValueError,
        "batch size 6 does not divide over data=4",
    ),
    "batches with NaN weights": (
        [changed(__weight__=np.array([1, 1, np.nan, 1, 1, 1, 1, 1], np.float32))],
        {},
        ValueError,
        "'__weight__' is nan, first in row 2; give",
    ),
    "batches of large integers": (
        dataset(large).batch(8),
        {},
        ValueError,
        f"'x' has integers from .* to {2**40 + 7}, which",
    ),
    "batches on the devices": (several(), {"placement": "device"}, ValueError, "device"),
    "an iterable that is longer than it says": (
        type("Longer", (list,), {"__len__": lambda self: 5})(several(changed())),
        {},
        ValueError,
        r"ended after 3 batches, and its len\(\) is 5; have",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_loader_can_use_is_refused_with_a_remedy(unannotated, case):
    source, options, kind, says = REFUSED[case]
    with pytest.raises(kind, match=says) as caught:
        take(eqxshard.Loader(source, mesh=mesh_of(count=4), **options), 8)
    assert isinstance(caught.value, ON_PURPOSE)
    # One sentence says what is wrong, and what to do.
    assert re.search(r"; .*\.", str(caught.value))


def test_a_dataset_that_is_finite_ends_a_run_with_a_remedy(train_step):
    rows = dataset(lambda i: {"x": np.ones(8, np.float32), "y": np.ones(4, np.float32)}, 24)
    batches = rows.to_iter_dataset().batch(8)
    loader = eqxshard.Loader(batches, mesh=mesh_of(count=8))
    says = r"the loader ended before step 4.*\.repeat\(\)"
    with pytest.raises(eqxshard.UsageError, match=says) as caught:
        eqxshard.fit(new_state(), train_step, loader, steps=4)
    assert int(caught.value.state.step) == 3  # pyright: ignore[reportAttributeAccessIssue]
    # The remedy of the error works.
    batches = rows.repeat().to_iter_dataset().batch(8)
    loader = eqxshard.Loader(batches, mesh=mesh_of(count=8))
    assert int(eqxshard.fit(new_state(), train_step, loader, steps=4).step) == 4


def test_an_endless_dataset_has_no_epochs(train_step):
    loader = eqxshard.Loader(examples().repeat(), batch_size=8, mesh=mesh_of(count=8))
    with pytest.raises(TypeError, match="no length, because its dataset is endless"):
        len(loader)
    with pytest.raises(ValueError, match=r"epochs=2.*steps="):
        eqxshard.fit(new_state(), train_step, loader, epochs=2)


def test_errors_of_the_users_own_functions_stay_theirs():
    def failing(i):
        if i == 5:
            raise OSError("example 5 is gone")
        return {"x": np.int32(i)}

    cases: list[tuple[Any, dict[str, Any]]] = [
        (dataset(failing), {"batch_size": 8}),
        (dataset(failing).batch(4), {}),
        (dataset(failing).to_iter_dataset().batch(4), {}),
    ]
    for source, options in cases:
        with pytest.raises(OSError, match="example 5 is gone"):
            take(eqxshard.Loader(source, mesh=mesh_of(count=4), **options), 8)
    with jax.enable_x64(True):
        (batch, *_) = take(
            eqxshard.Loader(dataset(large), batch_size=8, mesh=mesh_of(count=1)), 1
        )
        assert int(batch["x"][1]) == 2**40 + 1
