"""What compiled functions are made of."""

import re

import jax
import jax.numpy as jnp
from helpers import make_mesh

from eqxshard.training._jit import jit_on


def test_no_convolution_is_left_to_ynnpack():
    """It takes five times as long as XLA's own kernel for the gradient of a weight."""
    mesh = make_mesh("data=1")

    def fn(x, weight):
        def loss(weight):
            return jnp.sum(jax.lax.conv(x, weight, (1, 1), "SAME") ** 2)

        return jax.value_and_grad(loss)(weight)

    whole = jax.NamedSharding(mesh, jax.P())
    jitted = jit_on(mesh, fn, "fn", out_shardings=(whole, whole))
    lowered = jitted.lower(jnp.ones((8, 4, 12, 12)), jnp.ones((6, 4, 3, 3)))
    text = lowered.compile().as_text()
    assert len(re.findall(r" convolution\(", text)) == 2
    kinds = re.findall(r"ynn_fusion[^\n]*op_name=\"([^\"]*)\"", text)
    assert not [name for name in kinds if "conv_general_dilated" in name]
