"""A model whose parameters are used in the usual ways.

Its loss is linear in them, and the data are small integers: in bfloat16, gradients are
exact but for the sums over examples.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxshard

ROWS, SEQ, WIDTH, VOCAB, LAYERS = 128, 4, 16, 64, 2

#: What the logits are multiplied with.
MIXED = np.arange(VOCAB * WIDTH).reshape(VOCAB, WIDTH) % 3 - 1


class Layer(eqx.Module):
    matrix: jax.Array
    scale: jax.Array

    def __call__(self, x):
        # A residual that does not depend on the parameters of the layers before.
        total, x = x
        y = jnp.einsum("oi,...i->...o", self.matrix, x)
        return total + y + self.scale * x, x


class Summed(eqx.Module):
    """By name, how a parameter is used."""

    table: jax.Array
    places: jax.Array
    layers: Layer
    linear: eqx.nn.Linear
    conv: eqx.nn.Conv1d
    wide_scale: jax.Array
    channel: jax.Array
    looped: jax.Array
    scaled: jax.Array

    def __init__(self, key):
        self.table = jnp.zeros((VOCAB, WIDTH))
        self.places = jnp.zeros((SEQ, WIDTH))
        self.layers = Layer(jnp.zeros((LAYERS, WIDTH, WIDTH)), jnp.zeros((LAYERS, WIDTH)))
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.conv = eqx.nn.Conv1d(WIDTH, WIDTH, 3, padding=1, key=key)
        self.wide_scale, self.channel = jnp.zeros(WIDTH), jnp.zeros((SEQ, 1))
        self.looped, self.scaled = jnp.zeros((WIDTH, WIDTH)), jnp.zeros((WIDTH, WIDTH))

    def __call__(self, x, tokens):
        y, _ = eqxshard.scan_layers(self.layers, (jnp.zeros_like(x), x))
        # A table of which rows are looked up, and which makes logits, too.
        y += self.table[tokens] + x @ self.table.T @ jnp.asarray(MIXED, x.dtype)
        y += self.places + jax.vmap(self.linear)(x) + self.conv(x.T).T
        # In float32, as norms do; and with a dim that is summed later.
        wide = x.astype(jnp.float32) * self.wide_scale.astype(jnp.float32)
        y += wide.astype(x.dtype) + x * self.channel
        # Of the same matrix in each turn of a loop, and of a product with another.
        turns = jax.lax.scan(lambda y, x: (y + self.looped @ x, None), y[0], x)[0]
        return y + turns + x @ (2 * self.scaled).T


def loss_fn(model, batch, key):
    with jax.numpy_rank_promotion("allow"):
        y = jax.vmap(model)(batch["x"], batch["tokens"])
    return jnp.sum((y * batch["slope"]).astype(jnp.float32), axis=(1, 2))


def make_model(key):
    return jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, Summed(key))


def make_batch():
    rng = np.random.default_rng(0)
    x, slope = (
        rng.integers(low, 8, (ROWS, SEQ, WIDTH)).astype(np.float32) for low in (-7, 0)
    )
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ), np.int32)
    return {"x": x, "slope": slope, "tokens": tokens}
