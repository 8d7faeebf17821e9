import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

import eqxshard


def test_gather_gives_the_rows_asked_for_in_their_order():
    image = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    label = np.arange(6, dtype=np.int32) * 10
    source = eqxshard.data.ArraySource({"image": image, "label": label})
    batch = source.gather(np.array([4, 0, 4]))
    assert len(source) == 6
    assert batch["image"].dtype == np.uint8
    np.testing.assert_array_equal(batch["image"], image[[4, 0, 4]])
    np.testing.assert_array_equal(batch["label"], [40, 0, 40])


@pytest.mark.parametrize("view", [lambda x: x.swapaxes(1, 2), lambda x: x[::2]])
def test_gather_of_a_view_does_not_copy_the_whole_of_it(view):
    image = view(np.arange(2**20, dtype=np.int32).reshape(2**12, 16, 16))
    source = eqxshard.data.ArraySource({"image": image})
    tracemalloc.start()
    batch = source.gather(np.array([7, 3]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(batch["image"], [image[7], image[3]])
    assert peak < image.nbytes / 10


def test_gather_refuses_a_row_that_is_not_there():
    source = eqxshard.data.ArraySource({"x": np.zeros(3)})
    with pytest.raises(IndexError):
        source.gather(np.array([3]))


def test_repr_shows_length_names_types_and_shapes():
    source = eqxshard.data.ArraySource(
        {"image": np.zeros((1500, 28, 28), np.uint8), "label": np.zeros(1500, np.int32)}
    )
    assert repr(source) == "ArraySource(1,500 x {image: uint8[28, 28], label: int32})"


def test_arrays_must_have_one_length():
    with pytest.raises(ValueError, match="'x' has 3, 'y' has 4; give as many"):
        eqxshard.data.ArraySource({"x": np.zeros(3), "y": np.zeros(4)})


def test_arrays_must_have_examples():
    with pytest.raises(ValueError, match="'x' is a scalar"):
        eqxshard.data.ArraySource({"x": np.array(3.0)})
    with pytest.raises(ValueError, match="no arrays"):
        eqxshard.data.ArraySource({})


def test_lists_and_arrays_of_jax_are_arrays_too():
    source = eqxshard.data.ArraySource(
        {"x": [[1, 2], [3, 4]], "y": jnp.array([5, 6], jnp.bfloat16)}
    )
    batch = source.gather(np.array([1]))
    assert repr(source) == "ArraySource(2 x {x: int64[2], y: bfloat16})"
    assert batch["x"].tolist() == [[3, 4]]
    assert batch["y"].tolist() == [6]


@pytest.mark.parametrize("arrays", [np.zeros(3), [np.zeros(3)]])
def test_arrays_must_have_names(arrays, unannotated):
    with pytest.raises(TypeError, match=f"got a {type(arrays).__name__}; give a dict"):
        eqxshard.data.ArraySource(arrays)
