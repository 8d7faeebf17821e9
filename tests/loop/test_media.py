import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxshard
from eqxshard.loop._media import _jitted
from eqxshard.trackers import Histogram, Image


def test_pixels_are_bytes_of_rows_columns_and_channels():
    grey = np.array([[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]])
    assert Image(grey).pixels[..., 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    assert Image(jnp.ones((2, 3, 4), jnp.bfloat16)).pixels.tolist() == [[[255] * 4] * 3] * 2
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(Image(pixels).pixels, pixels)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2), (1, 2, 2, 3), (0, 3)])
def test_other_shapes_are_no_images(shape):
    with pytest.raises(ValueError, match=r"cannot have the shape \(.*give rows by columns"):
        Image(np.zeros(shape))


def test_other_numbers_are_no_pixels():
    with pytest.raises(ValueError, match="cannot be of int64; give bytes"):
        Image(np.zeros((2, 2), int))


def test_a_histogram_is_that_of_numpy():
    values = np.random.default_rng(0).normal(size=(40, 25)).astype(np.float32)
    found = Histogram(values, bins=7)
    counts, edges = np.histogram(values, bins=7)
    assert found.counts.tolist() == counts.tolist()
    np.testing.assert_allclose(found.edges, edges, rtol=1e-6, atol=1e-6)


def test_a_histogram_of_a_sharded_array_gathers_nothing():
    mesh = eqxshard.make_mesh()
    values = np.arange(4096, dtype=np.int32).reshape(64, 64)
    array = jax.device_put(values, eqxshard.batch_sharding(mesh))
    assert Histogram(array, bins=4).counts.tolist() == [1024.0] * 4
    whole = jax.NamedSharding(mesh, jax.P())
    text = _jitted(whole).lower(array, 4).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text


@pytest.mark.parametrize(
    "values, counts, edges",
    [
        ([2.0, 2.0], [0, 2], [1.5, 2.0, 2.5]),
        ([np.nan, np.inf], [0, 0], [-0.5, 0.0, 0.5]),
        ([np.nan, 0.0, 1.0], [1, 1], [0.0, 0.5, 1.0]),
        (True, [0, 1], [0.5, 1.0, 1.5]),
        ([2.0**30] * 3, [0, 3], [2.0**30 - 1088, 2.0**30 - 32, 2.0**30 + 1024]),
    ],
)
def test_values_that_are_alike_or_not_finite(values, counts, edges):
    found = Histogram(np.asarray(values), bins=2)
    assert (found.counts.tolist(), found.edges.tolist()) == (counts, edges)


def test_what_has_no_histogram_is_refused():
    with pytest.raises(ValueError, match=r"shape \(0, 3\) has no histogram; give one with"):
        Histogram(np.zeros((0, 3)))
    with pytest.raises(ValueError, match="bins=0 must be at least 1"):
        Histogram(np.zeros(3), bins=0)
