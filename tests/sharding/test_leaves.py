import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxshard.sharding._leaves import (
    array_leaves,
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


def test_stacked_layers_have_a_depth():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(2, 3, key=k))(jax.random.split(KEY, 5))
    assert stacked_depth(layers) == 5
    for other in ({"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.float32(0)}, {}):
        with pytest.raises(ValueError, match="without a common leading dim; stack the la"):
            stacked_depth(other)
