"""A vision transformer, as in Equinox's example "vision_transformer".

Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

channels = 3


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, size, hidden, heads, dropout, key):
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)]
        self.attention = eqx.nn.MultiheadAttention(heads, size, key=keys[0])
        self.up = eqx.nn.Linear(size, hidden, key=keys[1])
        self.down = eqx.nn.Linear(hidden, size, key=keys[2])
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x: Float[Array, "patches size"], inference, key):
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normed, normed, normed)
        keys = jax.random.split(key)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        hidden = self.dropout(hidden, inference=inference, key=keys[0])
        hidden = jax.vmap(self.down)(hidden)
        return x + self.dropout(hidden, inference=inference, key=keys[1])


class VisionTransformer(eqx.Module):
    embedding: eqx.nn.Linear
    positions: Float[Array, "patches+1 size"]
    cls_token: Float[Array, "1 size"]
    blocks: list[Block]
    dropout: eqx.nn.Dropout
    head: eqx.nn.Sequential
    patch_size: int

    def __init__(
        self,
        embedding_dim,
        hidden_dim,
        num_heads,
        num_layers,
        dropout_rate,
        patch_size,
        num_patches,
        num_classes,
        key,
    ):
        keys = jax.random.split(key, 4 + num_layers)
        pixels = channels * patch_size**2
        self.embedding = eqx.nn.Linear(pixels, embedding_dim, key=keys[0])
        self.positions = jax.random.normal(keys[1], (num_patches + 1, embedding_dim))
        self.cls_token = jax.random.normal(keys[2], (1, embedding_dim))
        sizes = (embedding_dim, hidden_dim, num_heads, dropout_rate)
        self.blocks = [Block(*sizes, key) for key in keys[4:]]
        self.dropout = eqx.nn.Dropout(dropout_rate)
        norm = eqx.nn.LayerNorm(embedding_dim)
        linear = eqx.nn.Linear(embedding_dim, num_classes, key=keys[3])
        self.head = eqx.nn.Sequential([norm, linear])
        self.patch_size = patch_size

    def __call__(self, x: Float[Array, "channels height width"], enable_dropout, key):
        size, (_, height, width) = self.patch_size, x.shape
        x = x.reshape(channels, height // size, size, width // size, size)
        x = x.transpose(1, 3, 0, 2, 4).reshape(-1, channels * size**2)
        x = jnp.concatenate([self.cls_token, jax.vmap(self.embedding)(x)])
        key, *keys = jax.random.split(key, 1 + len(self.blocks))
        x = x + self.positions[: len(x)]
        x = self.dropout(x, inference=not enable_dropout, key=key)
        for block, key in zip(self.blocks, keys):
            x = block(x, not enable_dropout, key)
        return self.head(x[0])
