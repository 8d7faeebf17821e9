"""A tiny decoder-only transformer in plain Equinox, which knows of no device or mesh."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

import eqxshard


class Attention(eqx.Module):
    # One array: the products with three would each have a gradient of their input, to be
    # summed over the devices that share the heads.
    qkv: Float[Array, "3 heads head_dim embed"]
    out: Float[Array, "embed heads head_dim"]

    def __init__(self, embed, heads, *, key):
        k1, k2 = jax.random.split(key)
        self.qkv = normal(k1, 3, heads, embed // heads, embed, fan_in=embed)
        self.out = normal(k2, embed, heads, embed // heads, fan_in=embed)

    def __call__(self, x: Float[Array, "seq embed"]) -> Float[Array, "seq embed"]:
        q, k, v = jnp.einsum("nhde,se->nhsd", self.qkv, x)
        scores = jnp.einsum("hsd,htd->hst", q, k) / q.shape[-1] ** 0.5
        past = jnp.tri(x.shape[0], dtype=bool)[None]
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        return jnp.einsum("ehd,hsd->se", self.out, jnp.einsum("hst,htd->hsd", weights, v))


class MLP(eqx.Module):
    up: Float[Array, "mlp embed"]
    bias: Float[Array, " mlp"]
    down: Float[Array, "embed mlp"]

    def __init__(self, embed, mlp, *, key):
        k1, k2 = jax.random.split(key)
        self.up = normal(k1, mlp, embed, fan_in=embed)
        self.bias = jnp.zeros(mlp)
        self.down = normal(k2, embed, mlp, fan_in=mlp)

    def __call__(self, x: Float[Array, " embed"]) -> Float[Array, " embed"]:
        return self.down @ jax.nn.gelu(self.up @ x + self.bias)


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    attention: Attention
    norm2: eqx.nn.RMSNorm
    mlp: MLP
    dropout: eqx.nn.Dropout

    def __init__(self, embed, heads, mlp, dropout, *, key):
        k1, k2 = jax.random.split(key)
        self.norm1 = eqx.nn.RMSNorm(embed, use_bias=False)
        self.attention = Attention(embed, heads, key=k1)
        self.norm2 = eqx.nn.RMSNorm(embed, use_bias=False)
        self.mlp = MLP(embed, mlp, key=k2)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "seq embed"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "seq embed"]:
        k1, k2 = (None, None) if key is None else jax.random.split(key)
        x = x + self.dropout(self.attention(jax.vmap(self.norm1)(x)), key=k1)
        return x + self.dropout(jax.vmap(self.mlp)(jax.vmap(self.norm2)(x)), key=k2)


class Transformer(eqx.Module):
    """From the tokens of one example to the logits of the token after each."""

    embedding: Float[Array, "vocab embed"]
    position: Float[Array, "seq embed"]
    blocks: Block
    norm: eqx.nn.RMSNorm
    unembedding: Float[Array, "vocab embed"] | None
    remat: Any = eqx.field(static=True)

    def __init__(
        self,
        key,
        *,
        vocab=96,
        seq=16,
        embed=32,
        heads=8,
        mlp=64,
        layers=2,
        dropout=0.1,
        tied=True,
        remat="full",
    ):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embedding = normal(k1, vocab, embed, fan_in=embed)
        self.position = normal(k2, seq, embed, fan_in=embed)
        self.blocks = eqx.filter_vmap(
            lambda key: Block(embed, heads, mlp, dropout, key=key)
        )(jax.random.split(k3, layers))
        self.norm = eqx.nn.RMSNorm(embed, use_bias=False)
        self.unembedding = None if tied else normal(k4, vocab, embed, fan_in=embed)
        self.remat = remat

    def __call__(
        self, tokens: Int[Array, " seq"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "seq vocab"]:
        x = self.embedding[tokens] + self.position[: tokens.shape[0]]
        x = eqxshard.scan_layers(self.blocks, x, key=key, remat=self.remat)
        out = self.embedding if self.unembedding is None else self.unembedding
        return jax.vmap(self.norm)(x) @ out.T


def next_token_losses(model, batch, key):
    """Losses, one per example, each the mean over its sequence."""
    tokens = batch["tokens"]
    keys = jax.random.split(key, tokens.shape[0])
    logits = jax.vmap(lambda tokens, key: model(tokens, key=key))(tokens[:, :-1], keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses, axis=-1)


def make_tokens(rows=8, seq=16, vocab=96, seed=0):
    """A batch `{"tokens": int32 "batch seq+1"}`."""
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, vocab, (rows, seq + 1), np.int32)}


def normal(key, *shape, fan_in):
    return jax.random.normal(key, shape) / fan_in**0.5
