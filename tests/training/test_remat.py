"""The parts that a gradient computes again, by the names of `scan_layers`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

import eqxshard

#: The name that jax.nn has for cuDNN's attention.
CUDNN = Primitive("dot_product_attention_fwd")
CUDNN.def_abstract_eval(lambda x: x)


@jax.custom_vjp
def cudnn(x):
    return CUDNN.bind(x)


# Its gradient needs the results of the operation itself, which have no name.
cudnn.defvjp(lambda x: (out := CUDNN.bind(x), out), lambda out, grad: (out * grad,))


class Layer(eqx.Module):
    """Two products with weights, and between them two for each pair of tokens."""

    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        hidden = x @ self.up
        scores = jnp.einsum("bsd,btd->bst", hidden, hidden)
        attended = checkpoint_name(scores @ hidden, "attention")
        return x + cudnn(jnp.sin(attended @ self.down))


LAYERS = Layer(jnp.ones((3, 4, 4)), jnp.ones((3, 4, 4)))


def gradient(remat):
    """The operations of the gradient, as text."""

    def loss(layers):
        return jnp.sum(eqxshard.scan_layers(layers, jnp.ones((2, 5, 4)), remat=remat))

    return str(jax.make_jaxpr(jax.grad(loss))(LAYERS))


@pytest.mark.parametrize(
    "remat, products, attention",
    [
        # Four products forward, and two backward for each of them.
        ("none", 12, 1),
        # The scores again.
        ("dots", 13, 1),
        ("offload", 13, 1),
        # Everything again.
        ("full", 16, 2),
        (jax.checkpoint_policies.dots_saveable, 12, 2),
        (jax.checkpoint_policies.everything_saveable, 12, 1),
    ],
)
def test_what_is_computed_again(remat, products, attention):
    text = gradient(remat)
    assert text.count("dot_general[") == products
    assert text.count("dot_product_attention_fwd") == attention


def test_what_is_kept_may_be_in_the_memory_of_the_host():
    assert "MemorySpace.Host" not in gradient("dots")
    # Two products, the named arrays, and the results of cuDNN's operation.
    assert gradient("offload").count("MemorySpace.Host") == 4


@pytest.mark.parametrize("remat", ["some", True])
def test_other_texts(remat, unannotated):
    message = f"remat={remat!r}; use one of 'none', 'dots', 'full'"
    with pytest.raises(ValueError, match=message):
        gradient(remat)
