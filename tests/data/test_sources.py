import tracemalloc

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import eqxshard
from eqxshard.data._sources import as_source


def test_gather_returns_rows_in_the_order_of_the_indices():
    image = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    label = np.arange(6, dtype=np.int32) * 10
    source = eqxshard.data.ArraySource({"image": image, "label": label})
    batch = source.gather(np.array([4, 0, 4]))
    assert len(source) == 6
    assert batch["image"].dtype == np.uint8
    np.testing.assert_array_equal(batch["image"], image[[4, 0, 4]])
    np.testing.assert_array_equal(batch["label"], [40, 0, 40])


@pytest.mark.parametrize("view", [lambda x: x.swapaxes(1, 2), lambda x: x[::2]])
def test_gather_from_a_view_does_not_copy_all_of_it(view):
    image = view(np.arange(2**20, dtype=np.int32).reshape(2**12, 16, 16))
    source = eqxshard.data.ArraySource({"image": image})
    tracemalloc.start()
    batch = source.gather(np.array([7, 3]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(batch["image"], [image[7], image[3]])
    assert peak < image.nbytes / 10


@pytest.mark.parametrize("count", [1, 64, 257])
def test_large_batches_are_where_cpu_devices_can_share_them(count):
    images = np.arange(300 * 4096, dtype=np.int32).reshape(300, 64, 64)
    source = eqxshard.data.ArraySource({"x": images})
    indices = np.arange(count)[::-1]
    # Alive, so that each has memory of its own.
    gathered = [source.gather(indices)["x"] for _ in range(8)]
    for rows in gathered:
        np.testing.assert_array_equal(rows, images[indices])
        assert rows.ctypes.data % 64 == 0 or rows.nbytes < 2**16


@pytest.mark.parametrize("row_bytes", [1, 2**16])
def test_gather_beyond_the_last_row_is_an_error(row_bytes):
    source = eqxshard.data.ArraySource({"x": np.zeros((3, row_bytes), np.uint8)})
    with pytest.raises(IndexError):
        source.gather(np.array([3]))


def test_what_are_not_arrays_of_examples_by_name_is_an_error(unannotated):
    for arrays, error, says in (
        ({"x": np.array(3.0)}, ValueError, r"the shapes \{'x': \(\)\}; give at least"),
        ({}, ValueError, "give at least one array"),
        ({"x": np.ones(2), "y": np.ones(3)}, ValueError, "the same first dim"),
        ([np.zeros(3)], TypeError, "got a list; give a dict"),
    ):
        with pytest.raises(error, match=says):
            eqxshard.data.ArraySource(arrays)  # pyright: ignore[reportArgumentType]


def test_lists_and_jax_arrays_are_converted():
    source = eqxshard.data.ArraySource(
        {"x": [[1, 2], [3, 4]], "y": jnp.array([5, 6], jnp.bfloat16)}
    )
    batch = source.gather(np.array([1]))
    assert batch["x"].tolist() == [[3, 4]]
    assert batch["y"].tolist() == [6]


def test_a_dataset_of_grains_is_no_source_and_needs_no_other_dataset_of_grains():
    with pytest.raises(TypeError, match=r"RangeMapDataset gives .* a dict of arrays"):
        as_source(grain.MapDataset.range(3))
