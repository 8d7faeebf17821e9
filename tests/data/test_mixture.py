import numpy as np
import pytest
from loader_helpers import MESHES, flat, loader_of, numbers, read

from eqxshard.data import ArraySource, Mixture, UniformSampler


def mixture(**weights):
    """`a` has the numbers 0 to 19, and `b` 100 to 104."""
    x = {"a": np.arange(20, dtype=np.int32), "b": np.arange(100, 105, dtype=np.int32)}
    return Mixture({name: (ArraySource({"x": x[name]}), w) for name, w in weights.items()})


@pytest.mark.parametrize(
    "weights, counts",
    [
        ({"a": 0.5, "b": 0.5}, (20, 20)),
        ({"a": 3.0, "b": 1}, (20, 7)),
        ({"a": 8, "b": 2}, (20, 5)),
        # b has fewer than its share would be, so a comes more often.
        ({"a": 0.95, "b": 0.05}, (95, 5)),
        ({"b": 1}, (5,)),
    ],
)
def test_every_example_is_there_and_shares_are_those_of_the_weights(weights, counts):
    source = mixture(**weights)
    x = source.gather(np.arange(len(source)))["x"]
    assert len(source) == sum(counts)
    for name, (low, size) in {"a": (0, 20), "b": (100, 5)}.items():
        if name in weights:
            times = np.bincount(x[(x >= low) & (x < low + size)] - low)
            assert len(times) == size and times.min() >= times.max() - 1 >= 0


def test_a_gather_is_in_the_order_of_the_indices():
    source = mixture(a=1, b=1)
    indices = np.array([25, 3, 20, 39, 0, 3])
    assert source.gather(indices)["x"].tolist() == [100, 3, 100, 104, 0, 3]


def test_a_loader_mixes_alike_on_every_mesh():
    options = {"sampler": UniformSampler(64), "seed": 3}
    expected = read(loader_of(mixture(a=1, b=3), **options), 4)
    for mesh in MESHES[1:3]:
        loader = loader_of(mixture(a=1, b=3), mesh=mesh, **options)
        loader.seek(2)
        assert read(loader, 2) == expected[2:]
    drawn = flat(read(loader_of(mixture(a=1, b=3), **options), 100))
    assert np.mean(np.array(drawn) >= 100) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    "sources, says",
    [
        ({}, "has no sources; give"),
        ({"a": (numbers(3), 0.0)}, "'a' has the weight 0.0 and 3 examples; give a"),
        ({"a": (numbers(3), float("nan"))}, "'a' has the weight nan"),
        ({"a": (numbers(0), 1.0)}, "'a' has the weight 1.0 and 0 examples"),
    ],
)
def test_what_cannot_be_mixed_is_an_error(sources, says):
    with pytest.raises(ValueError, match=says):
        Mixture(sources)


@pytest.mark.parametrize(
    "other", [{"y": np.arange(3)}, {"x": np.arange(3.0)}, {"x": np.ones((3, 2), np.int32)}]
)
def test_sources_with_other_entries_are_an_error(other):
    source = Mixture({"a": (numbers(3), 1), "b": (ArraySource(other), 1)})
    with pytest.raises(ValueError, match=r"examples of 'a' have .* and those of 'b'"):
        source.gather(np.arange(len(source)))
