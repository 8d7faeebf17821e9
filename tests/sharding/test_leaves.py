import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxshard.sharding._leaves import (
    array_leaves,
    is_array,
    is_inexact,
    is_key,
    stacked_depth,
)

KEY = jax.random.key(0)


def test_arrays_are_found_by_their_paths():
    linear = eqx.nn.Linear(2, 3, key=KEY)
    tree = {"layers": [linear, None], "name": "x", "scale": np.ones(2)}
    found = array_leaves(tree, "model")
    assert [(path, leaf.shape) for path, leaf in found] == [
        ("model.layers.0.weight", (3, 2)),
        ("model.layers.0.bias", (3,)),
        ("model.scale", (2,)),
    ]
    assert [path for path, _ in array_leaves(jnp.ones(2))] == [""]


@pytest.mark.parametrize(
    "leaf, array, inexact, key",
    [
        (jnp.ones(2), True, True, False),
        (jnp.ones(2, jnp.complex64), True, True, False),
        (jnp.ones(2, int), True, False, False),
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), True, True, False),
        (KEY, True, False, True),
    ],
    ids=["float", "complex", "integer", "shape", "key"],
)
def test_kinds_of_arrays(leaf, array, inexact, key):
    assert (is_array(leaf), is_inexact(leaf), is_key(leaf)) == (array, inexact, key)


def test_stacked_layers_have_a_depth():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(2, 3, key=k))(jax.random.split(KEY, 5))
    assert stacked_depth(layers) == 5
    for other in ({"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.float32(0)}, {}):
        with pytest.raises(ValueError, match="without a common leading dim; stack the la"):
            stacked_depth(other)
