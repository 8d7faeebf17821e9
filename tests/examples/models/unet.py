"""A U-Net with attention for diffusion, as in Equinox's example "unet".

Ho et al. 2020, https://arxiv.org/abs/2006.11239.
"""

import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def norm(channels):
    return eqx.nn.GroupNorm(min(channels // 4, 32), channels)


def split(key: Any, count: int = 2) -> list[Any]:
    return [None] * count if key is None else list(jax.random.split(key, count))


class TimeEmbedding(eqx.Module):
    # An array that no one means to train, but that gets gradients.
    frequencies: Float[Array, " half"]

    def __init__(self, size):
        half = size // 2
        self.frequencies = jnp.exp(jnp.arange(half) * (-math.log(10000) / (half - 1)))

    def __call__(self, t: Float[Array, ""]):
        angles = t * self.frequencies
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])


class LinearAttention(eqx.Module):
    norm: eqx.nn.GroupNorm
    heads: int
    qkv: eqx.nn.Conv2d
    out: eqx.nn.Conv2d

    def __init__(self, channels, heads, head_size, key):
        key1, key2 = split(key)
        self.norm = norm(channels)
        self.heads = heads
        self.qkv = eqx.nn.Conv2d(channels, 3 * heads * head_size, 1, key=key1)
        self.out = eqx.nn.Conv2d(heads * head_size, channels, 1, key=key2)

    def __call__(self, x: Float[Array, "channels height width"]):
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv.reshape(3, self.heads, -1, x.shape[1] * x.shape[2])
        context = jnp.einsum("hdn,hen->hde", jax.nn.softmax(k, axis=-1), v)
        out = jnp.einsum("hde,hdn->hen", context, q)
        return self.out(out.reshape(-1, *x.shape[1:]))


class ResnetBlock(eqx.Module):
    norms: list[eqx.nn.GroupNorm]
    convs: list[eqx.nn.Conv2d]
    time: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    scale: Any
    shortcut: eqx.nn.Conv2d | None
    attention: LinearAttention | None

    def __init__(self, dims, time_size, dropout, attention, scale=None, *, key):
        before, after = dims
        keys = split(key, 6)
        self.norms = [norm(before), norm(after)]
        self.convs = [
            eqx.nn.Conv2d(size, after, 3, padding=1, key=key)
            for size, key in zip(dims, keys)
        ]
        self.time = eqx.nn.Linear(time_size, after, key=keys[2])
        self.dropout = eqx.nn.Dropout(dropout)
        kernel = {"stride": 2, "padding": 1, "key": keys[3]}
        self.scale = None
        if scale == "up":
            self.scale = eqx.nn.ConvTranspose2d(before, before, 4, **kernel)
        elif scale == "down":
            self.scale = eqx.nn.Conv2d(before, before, 3, **kernel)
        changes = before != after or scale is not None
        self.shortcut = None
        if changes:
            self.shortcut = eqx.nn.Conv2d(before, after, 1, key=keys[4])
        self.attention = None
        if attention:
            heads, head_size = attention
            self.attention = LinearAttention(after, heads, head_size, keys[5])

    def __call__(self, x: Float[Array, "channels height width"], t, key):
        hidden = jax.nn.silu(self.norms[0](x))
        if self.scale is not None:
            hidden, x = self.scale(hidden), self.scale(x)
        hidden = self.convs[0](hidden) + self.time(jax.nn.silu(t))[:, None, None]
        hidden = self.dropout(jax.nn.silu(self.norms[1](hidden)), key=key)
        x = x if self.shortcut is None else self.shortcut(x)
        out = (self.convs[1](hidden) + x) / math.sqrt(2)
        return out if self.attention is None else out + self.attention(out)


class UNet(eqx.Module):
    time: TimeEmbedding
    mlp: eqx.nn.MLP
    first: eqx.nn.Conv2d
    down: list[list[ResnetBlock]]
    middle: list[ResnetBlock]
    up: list[list[ResnetBlock]]
    last: list

    def __init__(
        self,
        data_shape,
        is_biggan,
        dim_mults,
        hidden_size,
        heads,
        dim_head,
        dropout_rate,
        num_res_blocks,
        attn_resolutions,
        *,
        key,
    ):
        if is_biggan:
            raise NotImplementedError("here, only convolutions change the resolution")
        channels, height, _ = data_shape
        keys = iter(split(key, 64))
        dims = [hidden_size, *(hidden_size * mult for mult in dim_mults)]
        levels = list(itertools.pairwise(dims))

        def block(before, after, scale=None, attends=None):
            attends = height in attn_resolutions if attends is None else attends
            options = (hidden_size, dropout_rate, attends and (heads, dim_head), scale)
            return ResnetBlock((before, after), *options, key=next(keys))

        self.time = TimeEmbedding(hidden_size)
        self.mlp = eqx.nn.MLP(
            hidden_size, hidden_size, 4 * hidden_size, 1, jax.nn.silu, key=next(keys)
        )
        self.first = eqx.nn.Conv2d(channels, hidden_size, 3, padding=1, key=next(keys))
        self.down, self.up = [], []
        for depth, (before, after) in enumerate(levels, 1):
            deepest = depth == len(levels)
            blocks = [block(before, after)]
            blocks += [block(after, after) for _ in range(num_res_blocks - 2)]
            self.down.append(blocks if deepest else [*blocks, block(after, after, "down")])
            height = height if deepest else height // 2
        sizes = (dims[-1], dims[-1])
        self.middle = [block(*sizes, attends=True), block(*sizes, attends=False)]
        for depth, (before, after) in enumerate(reversed(levels), 1):
            blocks = [block(2 * after, after) for _ in range(num_res_blocks - 1)]
            blocks += [block(before + after, before)]
            shallowest = depth == len(levels)
            self.up.append(blocks if shallowest else [*blocks, block(before, before, "up")])
            height = height if shallowest else 2 * height
        last = eqx.nn.Conv2d(hidden_size, channels, 1, key=next(keys))
        self.last = [norm(hidden_size), jax.nn.silu, last]

    def __call__(self, t, y: Float[Array, "channels height width"], *, key=None):
        t = self.mlp(self.time(t))
        keys = iter(split(key, 64))
        y = self.first(y)
        seen = [y]
        for block in itertools.chain(*self.down):
            y = block(y, t, next(keys))
            seen.append(y)
        for block in self.middle:
            y = block(y, t, next(keys))
        for block in itertools.chain(*self.up):
            if not isinstance(block.scale, eqx.nn.ConvTranspose2d):
                y = jnp.concatenate([y, seen.pop()])
            y = block(y, t, next(keys))
        for layer in self.last:
            y = layer(y)
        return y
