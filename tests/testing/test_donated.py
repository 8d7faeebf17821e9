import warnings

import equinox as eqx
import jax
import numpy as np
import pytest
from helpers import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard import testing


def test_a_step_that_reuses_its_state_passes_and_the_state_stays_valid(split):
    state, step, batch = split
    testing.assert_donated(step, state, batch)
    testing.assert_donated(step, state, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if eqx.is_array(x))


def tree_on(mesh):
    values = {"a": np.ones((8, 4), np.float32), "b": [np.ones(16, np.float32)]}
    return jax.device_put(values, NamedSharding(make_mesh(mesh), P("data")))


def test_arrays_that_are_not_donated_are_errors():
    # An array that is returned as it is shares its memory, but is not donated either.
    scale = lambda tree, by: {"a": by * tree["a"], "b": tree["b"]}  # noqa: E731
    with pytest.raises(AssertionError) as error:
        testing.assert_donated(scale, tree_on("data=8"), 2.0)
    assert "the memory of 2 of 2 arrays of the state is not reused" in str(error.value)
    assert "\n  a: float32[8,4]\n  b.0: float32[16]\n" in str(error.value)


def test_arrays_that_are_deleted_and_not_reused_are_errors():
    def delete(tree):
        new = {"a": 2 * tree["a"], "b": 2 * tree["b"][0]}
        tree["b"][0].delete()
        return new

    with pytest.raises(AssertionError, match=r"\n  b.0: float32\[16\]\n"):
        testing.assert_donated(delete, tree_on("data=8"))


@pytest.mark.parametrize("mesh", ["data=1", "data=8"])
def test_arrays_that_are_donated_but_not_reused_are_errors(mesh):
    @eqxshard.filter_jit(donate=0)
    def shorten(tree):
        warnings.warn("something else", UserWarning, stacklevel=1)
        return {"a": 2 * tree["a"], "b": tree["b"][0][:3]}

    with (
        pytest.raises(AssertionError, match="the memory of 1 of 2 arrays") as error,
        pytest.warns(UserWarning, match="something else"),
    ):
        testing.assert_donated(shorten, tree_on(mesh))
    assert "\n  b.0: float32[16]\n" in str(error.value)
