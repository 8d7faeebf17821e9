"""Equinox's layers, and published models written small, for a survey of `typecheck`.

Each is a function of a key to a model, a function of the model, one example and a key to an
array, and the shape of an example (of integers below 16, if it says so).
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float


class Case(NamedTuple):
    """A model and how it is called, on one example."""

    make: Callable[..., Any]
    shape: tuple[int, ...] = (8,)
    call: Callable[[Any, Any, Any], Any] = lambda model, x, key: model(x)
    dtype: Any = jnp.float32
    split: tuple[str, ...] = ("mlp", "heads")


class Embedding(nn.Embedding):
    """Equinox's, with a lookup that JAX can type."""

    def __call__(self, x, *, key=None):
        # `.at[x].get(out_sharding=P())` would do under one `jax.vmap`, and not under two.
        look_up: Any = jax.sharding.auto_axes(lambda table, x: table[x], out_sharding=P())
        return look_up(self.weight, x)


def _layer(layer: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda key: layer(*args, **kwargs, key=key)


def _plain(layer: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda key: layer(*args, **kwargs)


def _unroll(cell: Any, x: Any, key: Any) -> Any:
    """The last state of a recurrent cell over a sequence."""
    zeros = jnp.zeros(cell.hidden_size, x.dtype)
    first = (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros
    last, _ = jax.lax.scan(lambda state, row: (cell(row, state), None), first, x)
    return last[0] if isinstance(last, tuple) else last


IMAGE, VOLUME = (4, 8, 8), (4, 4, 4, 4)
LAYERS = {
    "Linear": Case(_layer(nn.Linear, 8, 16)),
    "MLP": Case(_layer(nn.MLP, 8, 8, 16, 2)),
    "Identity": Case(_plain(nn.Identity)),
    "Lambda": Case(_plain(nn.Lambda, jax.nn.gelu)),
    "Sequential": Case(
        lambda key: nn.Sequential(
            [nn.Linear(8, 16, key=key), nn.Lambda(jax.nn.relu), nn.Linear(16, 8, key=key)]
        )
    ),
    "Conv1d": Case(_layer(nn.Conv1d, 4, 8, 3, padding=1), (4, 8)),
    "Conv2d": Case(_layer(nn.Conv2d, 4, 8, 3, padding=1), IMAGE),
    "Conv3d": Case(_layer(nn.Conv3d, 4, 8, 3, padding=1), VOLUME),
    "Conv2d of groups": Case(_layer(nn.Conv2d, 4, 8, 3, groups=4), IMAGE),
    "ConvTranspose1d": Case(_layer(nn.ConvTranspose1d, 4, 8, 2, stride=2), (4, 8)),
    "ConvTranspose2d": Case(_layer(nn.ConvTranspose2d, 4, 8, 2, stride=2), IMAGE),
    "ConvTranspose3d": Case(_layer(nn.ConvTranspose3d, 4, 8, 2, stride=2), VOLUME),
    "AvgPool1d": Case(_plain(nn.AvgPool1d, 2, 2), (4, 8)),
    "AvgPool2d": Case(_plain(nn.AvgPool2d, 2, 2), IMAGE),
    "AvgPool3d": Case(_plain(nn.AvgPool3d, 2, 2), VOLUME),
    "MaxPool1d": Case(_plain(nn.MaxPool1d, 2, 2), (4, 8)),
    "MaxPool2d": Case(_plain(nn.MaxPool2d, 2, 2), IMAGE),
    "MaxPool3d": Case(_plain(nn.MaxPool3d, 2, 2), VOLUME),
    "AdaptiveAvgPool1d": Case(_plain(nn.AdaptiveAvgPool1d, 4), (4, 8)),
    "AdaptiveAvgPool2d": Case(_plain(nn.AdaptiveAvgPool2d, 4), IMAGE),
    "AdaptiveAvgPool3d": Case(_plain(nn.AdaptiveAvgPool3d, 2), VOLUME),
    "AdaptiveMaxPool1d": Case(_plain(nn.AdaptiveMaxPool1d, 4), (4, 8)),
    "AdaptiveMaxPool2d": Case(_plain(nn.AdaptiveMaxPool2d, 4), IMAGE),
    "AdaptiveMaxPool3d": Case(_plain(nn.AdaptiveMaxPool3d, 2), VOLUME),
    "LayerNorm": Case(_plain(nn.LayerNorm, 8)),
    "RMSNorm": Case(_plain(nn.RMSNorm, 8)),
    "GroupNorm": Case(_plain(nn.GroupNorm, 2, 8), (8, 4)),
    "BatchNorm (ema)": Case(
        lambda key: nn.make_with_state(nn.BatchNorm)(8, "batch", mode="ema"), (8, 4)
    ),
    "BatchNorm (batch)": Case(
        lambda key: nn.make_with_state(nn.BatchNorm)(8, "batch", mode="batch"), (8, 4)
    ),
    "SpectralNorm": Case(
        lambda key: nn.make_with_state(nn.SpectralNorm)(
            nn.Linear(8, 16, key=key), "weight", key=key
        )
    ),
    "Sequential with state": Case(
        lambda key: nn.make_with_state(nn.Sequential)(
            [nn.Linear(8, 8, key=key), nn.BatchNorm(8, "batch", mode="batch")]
        )
    ),
    "WeightNorm": Case(lambda key: nn.WeightNorm(nn.Linear(8, 16, key=key), "weight")),
    "Embedding": Case(
        _layer(nn.Embedding, 16, 8), (), lambda model, x, key: model(x), jnp.int32
    ),
    "Dropout": Case(_plain(nn.Dropout, 0.5), call=lambda model, x, key: model(x, key=key)),
    "PReLU": Case(_plain(nn.PReLU)),
    "MultiheadAttention": Case(
        _layer(nn.MultiheadAttention, 4, 16), (6, 16), lambda model, x, key: model(x, x, x)
    ),
    "RotaryPositionalEmbedding": Case(_plain(nn.RotaryPositionalEmbedding, 8), (6, 8)),
    "GRUCell": Case(_layer(nn.GRUCell, 4, 8), (6, 4), _unroll),
    "LSTMCell": Case(_layer(nn.LSTMCell, 4, 8), (6, 4), _unroll),
    "Shared": Case(
        lambda key: nn.Shared(
            [nn.Linear(8, 8, key=key), nn.Linear(8, 8, key=key)],
            lambda pair: pair[0].weight,
            lambda pair: pair[1].weight,
        ),
        call=lambda model, x, key: model()[1](model()[0](x)),
    ),
}


class GPT2(eqx.Module):
    """Radford et al. 2019."""

    tokens: nn.Embedding
    positions: nn.Embedding
    blocks: list["GPT2Block"]
    norm: nn.LayerNorm

    def __init__(self, key, embedding=nn.Embedding):
        keys = jax.random.split(key, 4)
        self.tokens = embedding(16, 16, key=keys[0])
        self.positions = embedding(8, 16, key=keys[1])
        self.blocks = [GPT2Block(each) for each in keys[2:]]
        self.norm = nn.LayerNorm(16)

    def __call__(self, ids):
        x = jax.vmap(self.tokens)(ids) + jax.vmap(self.positions)(jnp.arange(len(ids)))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.tokens.weight.T


class GPT2Block(eqx.Module):
    norm1: nn.LayerNorm
    attention: nn.MultiheadAttention
    norm2: nn.LayerNorm
    mlp: nn.MLP
    causal: bool = eqx.field(static=True)

    def __init__(self, key, causal=True):
        one, two = jax.random.split(key)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(4, 16, key=one)
        self.mlp = nn.MLP(16, 16, 32, 1, activation=jax.nn.gelu, key=two)
        self.causal = causal

    def __call__(self, x):
        h = jax.vmap(self.norm1)(x)
        mask = jnp.tri(len(x), dtype=bool) if self.causal else None
        x = x + self.attention(h, h, h, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


class Llama(eqx.Module):
    """Touvron et al. 2023: rotary positions, grouped queries, a gated perceptron."""

    tokens: nn.Embedding
    query: Float[Array, "embed heads dim"]
    key: Float[Array, "embed kv_heads dim"]
    value: Float[Array, "embed kv_heads dim"]
    out: Float[Array, "heads dim embed"]
    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    scale: Float[Array, " embed"]

    def __init__(self, key, embedding=nn.Embedding):
        shapes = [(16, 4, 4), (16, 2, 4), (16, 2, 4), (4, 4, 16)]
        shapes += [(16, 32), (16, 32), (32, 16)]
        arrays = [jax.random.normal(key, shape) / 4 for shape in shapes]
        self.query, self.key, self.value, self.out = arrays[:4]
        self.gate, self.up, self.down = arrays[4:]
        self.tokens = embedding(16, 16, key=key)
        self.scale = jnp.ones(16)

    def __call__(self, ids):
        x = jax.vmap(self.tokens)(ids)
        h = x * self.scale * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q = _rotate(jnp.einsum("se,ehd->shd", h, self.query))
        k = _rotate(jnp.einsum("se,ehd->shd", h, self.key))
        v = jnp.einsum("se,ehd->shd", h, self.value)
        x = x + jnp.einsum(
            "shd,hde->se", jax.nn.dot_product_attention(q, k, v, is_causal=True), self.out
        )
        x = x + (jax.nn.silu(x @ self.gate) * (x @ self.up)) @ self.down
        return x @ self.tokens.weight.T


def _rotate(x):
    angles = jnp.arange(x.shape[0])[:, None] / 100 ** (jnp.arange(2) / 2)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


class BERT(eqx.Module):
    """Devlin et al. 2018, as in Equinox's examples."""

    tokens: nn.Embedding
    position: Array
    block: GPT2Block
    pooler: nn.Linear

    def __init__(self, key, embedding=nn.Embedding):
        self.tokens = embedding(16, 16, key=key)
        self.position = jax.random.normal(key, (8, 16))
        self.block = GPT2Block(key, causal=False)
        self.pooler = nn.Linear(16, 2, key=key)

    def __call__(self, ids):
        x = self.block(jax.vmap(self.tokens)(ids) + self.position)
        return self.pooler(jnp.tanh(x[0]))


class ESM2(eqx.Module):
    """Lin et al. 2022: a masked protein model with rotary positions."""

    tokens: nn.Embedding
    attention: nn.MultiheadAttention
    rope: nn.RotaryPositionalEmbedding
    head: nn.Linear

    def __init__(self, key, embedding=nn.Embedding):
        self.tokens = embedding(16, 16, key=key)
        self.attention = nn.MultiheadAttention(4, 16, key=key)
        self.rope = nn.RotaryPositionalEmbedding(4)
        self.head = nn.Linear(16, 16, key=key)

    def __call__(self, ids):
        def heads(query, key, value):
            turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return turn(query), turn(key), value

        x = jax.vmap(self.tokens)(ids)
        return jax.vmap(self.head)(x + self.attention(x, x, x, process_heads=heads))


class ViT(eqx.Module):
    """Dosovitskiy et al. 2020, as in Equinox's examples."""

    patches: nn.Conv2d
    token: Array
    position: Array
    block: GPT2Block
    head: nn.Linear

    def __init__(self, key):
        self.patches = nn.Conv2d(3, 16, 4, 4, key=key)
        self.token, self.position = jnp.zeros((1, 16)), jnp.zeros((5, 16))
        self.block = GPT2Block(key, causal=False)
        self.head = nn.Linear(16, 10, key=key)

    def __call__(self, image):
        x = self.patches(image).reshape(16, -1).T
        x = self.block(jnp.concatenate([self.token, x]) + self.position)
        return self.head(x[0])


class Mixer(eqx.Module):
    """Tolstikhin et al. 2021, as in Equinox's examples."""

    patches: nn.Conv2d
    mix_patches: nn.MLP
    mix_hidden: nn.MLP
    norm: nn.LayerNorm
    head: nn.ConvTranspose2d

    def __init__(self, key):
        self.patches = nn.Conv2d(3, 8, 4, 4, key=key)
        self.mix_patches = nn.MLP(4, 4, 16, 1, key=key)
        self.mix_hidden = nn.MLP(8, 8, 16, 1, key=key)
        self.norm = nn.LayerNorm((8, 4))
        self.head = nn.ConvTranspose2d(8, 3, 4, 4, key=key)

    def __call__(self, image):
        x = self.patches(image).reshape(8, 4)
        x = x + jax.vmap(self.mix_patches)(self.norm(x))
        x = x + jax.vmap(self.mix_hidden, in_axes=1, out_axes=1)(x)
        return self.head(x.reshape(8, 2, 2))


class ConvNeXt(eqx.Module):
    """Liu et al. 2022: one block, after the stem."""

    stem: nn.Conv2d
    depthwise: nn.Conv2d
    norm: nn.LayerNorm
    mlp: nn.MLP
    scale: Array
    head: nn.Linear

    def __init__(self, key):
        self.stem = nn.Conv2d(3, 8, 2, 2, key=key)
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8, key=key)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.MLP(8, 8, 32, 1, activation=jax.nn.gelu, key=key)
        self.scale = jnp.full((8, 1, 1), 1e-6)
        self.head = nn.Linear(8, 10, key=key)

    def __call__(self, image):
        x = self.stem(image)
        rows = jnp.moveaxis(self.depthwise(x), 0, -1).reshape(-1, 8)
        rows = jax.vmap(lambda row: self.mlp(self.norm(row)))(rows)
        x = x + self.scale * jnp.moveaxis(rows.reshape(4, 4, 8), -1, 0)
        return self.head(jnp.mean(x, (1, 2)))


class UNet(eqx.Module):
    """Ronneberger et al. 2015: one level down and up."""

    down: nn.Conv2d
    middle: nn.Conv2d
    up: nn.ConvTranspose2d
    last: nn.Conv2d
    pool: nn.MaxPool2d
    norm: nn.GroupNorm

    def __init__(self, key):
        self.down = nn.Conv2d(3, 8, 3, padding=1, key=key)
        self.middle = nn.Conv2d(8, 16, 3, padding=1, key=key)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2, key=key)
        self.last = nn.Conv2d(16, 1, 1, key=key)
        self.pool, self.norm = nn.MaxPool2d(2, 2), nn.GroupNorm(4, 8)

    def __call__(self, image):
        x = jax.nn.silu(self.norm(self.down(image)))
        y = jax.nn.silu(self.middle(self.pool(x)))
        return self.last(jnp.concatenate([x, self.up(y)]))


class Mamba(eqx.Module):
    """Gu and Dao 2023: a selective state space, by an associative scan."""

    into: nn.Linear
    conv: nn.Conv1d
    select: nn.Linear
    step: nn.Linear
    log_a: Float[Array, "mlp state"]
    skip: Float[Array, " mlp"]
    out: nn.Linear

    def __init__(self, key):
        self.into = nn.Linear(8, 32, use_bias=False, key=key)
        self.conv = nn.Conv1d(16, 16, 4, padding=[(3, 0)], groups=16, key=key)
        self.select = nn.Linear(16, 9, use_bias=False, key=key)
        self.step = nn.Linear(1, 16, key=key)
        self.log_a = jnp.log(jnp.ones((16, 4)) * jnp.arange(1.0, 5.0))
        self.skip = jnp.ones(16)
        self.out = nn.Linear(16, 8, use_bias=False, key=key)

    def __call__(self, x):
        u, gate = jnp.split(jax.vmap(self.into)(x), 2, -1)
        u = jax.nn.silu(self.conv(u.T).T)
        step, b, c = jnp.split(jax.vmap(self.select)(u), [1, 5], -1)
        step = jax.nn.softplus(jax.vmap(self.step)(step))
        decay = jnp.exp(-step[..., None] * jnp.exp(self.log_a))
        given = (step * u)[..., None] * b[:, None]

        def join(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, states = jax.lax.associative_scan(join, (decay, given))
        y = jnp.einsum("sdn,sn->sd", states, c) + u * self.skip
        return jax.vmap(self.out)(y * jax.nn.silu(gate))


class MAF(eqx.Module):
    """Papamakarios et al. 2017: masked autoregressive layers of a flow."""

    up: Float[Array, "mlp in"]
    up_bias: Float[Array, " mlp"]
    down: Float[Array, "out mlp"]
    down_bias: Float[Array, " out"]

    def __init__(self, key):
        self.up = jax.random.normal(key, (32, 4)) / 2
        self.down = jax.random.normal(key, (8, 32)) / 6
        self.up_bias, self.down_bias = jnp.zeros(32), jnp.zeros(8)

    def __call__(self, x):
        inputs, hidden = jnp.arange(4), jnp.arange(32) % 3
        first = hidden[:, None] >= inputs
        second = jnp.tile(inputs, 2)[:, None] > hidden
        h = jax.nn.relu((self.up * first) @ x + self.up_bias)
        shift, scale = jnp.split((self.down * second) @ h + self.down_bias, 2)
        z = (x - shift) * jnp.exp(-scale)
        return jnp.sum(jax.scipy.stats.norm.logpdf(z)) - jnp.sum(scale)


class LanguageLSTM(eqx.Module):
    """Zaremba et al. 2014: words by a long short-term memory."""

    tokens: nn.Embedding
    cell: nn.LSTMCell
    head: nn.Linear

    def __init__(self, key, embedding=nn.Embedding):
        self.tokens = embedding(16, 8, key=key)
        self.cell = nn.LSTMCell(8, 8, key=key)
        self.head = nn.Linear(8, 16, key=key)

    def __call__(self, ids):
        def step(state, x):
            state = self.cell(x, state)
            return state, state[0]

        zeros = jnp.zeros(8)
        _, hidden = jax.lax.scan(step, (zeros, zeros), jax.vmap(self.tokens)(ids))
        return jax.vmap(self.head)(hidden)


class DQN(eqx.Module):
    """Mnih et al. 2015: Q-values of frames."""

    layers: nn.Sequential

    def __init__(self, key):
        relu = nn.Lambda(jax.nn.relu)
        self.layers = nn.Sequential(
            [
                *(nn.Conv2d(4, 8, 4, 2, key=key), relu),
                *(nn.Conv2d(8, 8, 3, 1, key=key), relu, nn.Lambda(jnp.ravel)),
                *(nn.Linear(8, 16, key=key), relu, nn.Linear(16, 6, key=key)),
            ]
        )

    def __call__(self, frames):
        return self.layers(frames)


class NeuralODE(eqx.Module):
    """Chen et al. 2018, as in Diffrax's examples."""

    field: nn.MLP

    def __init__(self, key):
        self.field = nn.MLP(4, 4, 16, 2, activation=jax.nn.softplus, key=key)

    def __call__(self, y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: self.field(y)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=y,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
        )
        assert solution.ys is not None
        return solution.ys[-1]


def _tokens(make: Any, split: tuple[str, ...] = ("mlp", "heads")) -> Case:
    return Case(make, (8,), dtype=jnp.int32, split=split)


TOKENS = {
    "GPT-2": _tokens(GPT2),
    "Llama": _tokens(Llama, ("mlp", "heads", "kv_heads")),
    "BERT": _tokens(BERT),
    "ESM-2": _tokens(ESM2, ("heads",)),
    "LSTM": _tokens(LanguageLSTM, ("gates",)),
}
TYPED = {
    f"{name}, typed lookup": case._replace(make=ft.partial(case.make, embedding=Embedding))
    for name, case in TOKENS.items()
}
PUBLISHED = {
    **TOKENS,
    **TYPED,
    "ViT": Case(ViT, (3, 8, 8)),
    "Mixer": Case(Mixer, (3, 8, 8), split=("mlp",)),
    "ConvNeXt": Case(ConvNeXt, (3, 8, 8), split=("mlp",)),
    "U-Net": Case(UNet, (3, 8, 8), split=("channels",)),
    "Mamba": Case(Mamba, (6, 8), split=("mlp",)),
    "MAF": Case(MAF, (4,), split=("mlp",)),
    "DQN": Case(DQN, (4, 8, 8), split=("out",)),
    "neural ODE": Case(NeuralODE, (4,), split=("mlp",)),
}
