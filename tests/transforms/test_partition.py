import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxshard.transforms._partition import Static, partition


def make(seed=0, activation=jax.nn.relu):
    return eqx.nn.MLP(2, 3, 4, 1, activation, key=jax.random.key(seed))


def test_a_tree_is_put_together_again():
    tree = {"model": make(), "name": "x", "count": 3}
    arrays, static = partition(tree)
    assert static.array_count == len(arrays) == 4
    assert eqx.tree_equal(static.combine(arrays), tree)
    doubled = static.combine([2 * array for array in arrays])
    assert jnp.array_equal(doubled["model"].layers[0].bias, 2 * arrays[1])


def test_static_parts_are_equal_if_the_programs_are_the_same():
    _, static = partition(make())
    _, other = partition(make(seed=1))
    assert static == other and hash(static) == hash(other)
    _, other = partition(make(activation=jax.nn.gelu))
    assert static != other
    # These compare equal in Python, and each is a different program.
    one, real, true = (partition({"x": x})[1] for x in (1, 1.0, True))
    assert one != real and one != true and real != true
    assert one != "x"


def test_shapes_can_be_part_of_what_is_compared():
    arrays, static = partition(make())
    wider = [jnp.ones((2, *array.shape)) for array in arrays]
    assert static.with_shapes(arrays) == static.with_shapes(arrays)
    assert static.with_shapes(arrays) != static.with_shapes(wider)
    assert isinstance(static.with_shapes(arrays), Static)


def test_leaves_that_are_not_hashable_are_named():
    with pytest.raises(TypeError, match=r"^batch\.tags is a set, neither an array nor has"):
        partition({"tags": {1}, "x": jnp.ones(2)}, "batch")
