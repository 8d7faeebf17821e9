import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxshard.sharding._leaves import stacked_depth

KEY = jax.random.key(0)


def test_stacked_layers_have_a_depth():
    layers = eqx.filter_vmap(lambda k: eqx.nn.Linear(2, 3, key=k))(jax.random.split(KEY, 5))
    assert stacked_depth(layers) == 5
    for other in ({"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.float32(0)}, {}):
        with pytest.raises(ValueError, match="without a common leading dim; stack the la"):
            stacked_depth(other)
