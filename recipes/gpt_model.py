"""A decoder in plain Equinox: GPT-2, Llama, or a mixture of the two, by its shape.

The annotations name the dims of arrays, and rules split them over a mesh. Three places
know more about the mesh: `GPT.embed` says how activations are split, `GPT.hidden` runs the
layers as a pipeline if there are stages, and `MLP` leaves sequences as they are if
`context` splits them. Attention and experts come from eqxshard, and look at the mesh
themselves.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from gpt_generate import KVCache
from jax import P
from jaxtyping import Array, Float, Int, Key

import eqxshard
from eqxshard import nn

Remat = Literal["none", "dots", "full", "offload"]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and the kinds of its parts."""

    layers: int
    heads: int
    embed: int
    mlp: int
    seq_len: int
    kv_heads: int
    vocab_size: int = 0
    positions: Literal["rotary", "learned"] = "rotary"
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    tied: bool = True
    bias: bool = False
    theta: float = 10_000.0
    rope_scaling: nn.RotaryScaling | None = None
    epsilon: float = 1e-5
    dropout: float = 0.0
    experts: int = 0
    top_k: int = 2

    def __post_init__(self):
        for name in ("layers", "heads", "kv_heads", "embed", "mlp"):
            if getattr(self, name) < 1:
                raise eqxshard.UsageError(
                    f"{name}={getattr(self, name)} is too small; use 1 or more."
                )
        if self.seq_len < 2:
            raise eqxshard.UsageError(
                f"seq_len={self.seq_len} is too small; use 2 or more."
            )
        if self.embed % self.heads:
            raise eqxshard.UsageError(
                f"embed={self.embed} does not divide over heads={self.heads}; use a "
                "multiple."
            )
        if self.heads % self.kv_heads:
            raise eqxshard.UsageError(
                f"heads={self.heads} does not divide over kv_heads={self.kv_heads}; use a "
                "multiple."
            )

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


def llama3(layers: int, heads: int, embed: int, mlp: int, tied: bool = False) -> Shape:
    """A shape of Llama 3."""
    return Shape(
        layers=layers,
        heads=heads,
        kv_heads=8,
        embed=embed,
        mlp=mlp,
        seq_len=8192,
        vocab_size=128_256,
        theta=500_000.0,
        tied=tied,
    )


SIZES: dict[str, Shape] = {
    "tiny": Shape(layers=2, heads=4, kv_heads=2, embed=64, mlp=192, seq_len=64),
    "124m": Shape(
        layers=12,
        heads=12,
        kv_heads=12,
        embed=768,
        mlp=3072,
        seq_len=1024,
        # The 50,257 of GPT-2 rounded up, for matrix products of even sizes.
        vocab_size=50_304,
        positions="learned",
        norm="layer",
        activation="gelu",
        bias=True,
    ),
    "1b": llama3(layers=16, heads=32, embed=2048, mlp=8192, tied=True),
    "8b": llama3(layers=32, heads=32, embed=4096, mlp=14_336),
    "70b": llama3(layers=80, heads=64, embed=8192, mlp=28_672),
}


class Norm(eqx.Module):
    weight: Float[Array, " embed"]
    bias: Float[Array, " embed"] | None
    centered: bool = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(self, shape: Shape):
        self.centered = shape.norm == "layer"
        self.epsilon = shape.epsilon
        self.weight = jnp.ones(shape.embed)
        self.bias = jnp.zeros(shape.embed) if shape.bias else None

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.centered:
            y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.epsilon)
        y = y.astype(x.dtype) * self.weight
        return y if self.bias is None else y + self.bias


class Attention(eqx.Module):
    # For each head of keys and values: the queries that use it, the key and the value.
    qkv: Float[Array, "kv_heads queries_key_value head_dim embed"]
    qkv_bias: Float[Array, "kv_heads queries_key_value head_dim"] | None
    out: Float[Array, "embed heads head_dim"]
    out_bias: Float[Array, " embed"] | None
    theta: float | None = eqx.field(static=True)
    scaling: nn.RotaryScaling | None = eqx.field(static=True)

    def __init__(self, shape: Shape, key: Key[Array, ""]):
        k1, k2 = jax.random.split(key)
        split = (shape.kv_heads, shape.heads // shape.kv_heads + 2, shape.head_dim)
        self.qkv = 0.02 * jax.random.normal(k1, (*split, shape.embed))
        self.qkv_bias = jnp.zeros(split) if shape.bias else None
        out = (shape.embed, shape.heads, shape.head_dim)
        self.out = 0.02 / (2 * shape.layers) ** 0.5 * jax.random.normal(k2, out)
        self.out_bias = jnp.zeros(shape.embed) if shape.bias else None
        self.theta = shape.theta if shape.positions == "rotary" else None
        self.scaling = shape.rope_scaling

    def __call__(self, x, positions, segments=None, cache=None):
        """Also returns the cache, with the keys and values of these positions."""
        y = jnp.einsum("knde,...se->...sknd", self.qkv, x)
        if self.qkv_bias is not None:
            y = y + self.qkv_bias
        query, key, value = y[..., :-2, :], y[..., -2, :], y[..., -1, :]
        query = query.reshape(*query.shape[:-3], -1, query.shape[-1])
        if self.theta is not None:
            query = nn.rotary(query, positions, theta=self.theta, scaling=self.scaling)
            key = nn.rotary(key, positions, theta=self.theta, scaling=self.scaling)
        offset = None
        if cache is not None:
            offset, cache = cache.length, cache.append(key, value)
            key, value = cache.key, cache.value
        attend = partial(nn.attention, causal=True, offset=offset)
        if x.ndim == 2:
            # A pipeline gives its layers one example at a time.
            one = segments if segments is None else segments[None]
            y = attend(query[None], key[None], value[None], segments=one)[0]
        else:
            y = attend(query, key, value, segments=segments)
        y = jnp.einsum("ehd,...shd->...se", self.out, y)
        if self.out_bias is not None:
            y = y + self.out_bias
        return y, cache


class MLP(eqx.Module):
    # With SwiGLU, two halves: the gate, and the values that it scales.
    up: Float[Array, "halves mlp embed"]
    up_bias: Float[Array, "halves mlp"] | None
    down: Float[Array, "embed mlp"]
    down_bias: Float[Array, " embed"] | None

    def __init__(self, shape: Shape, key: Key[Array, ""]):
        k1, k2 = jax.random.split(key)
        halves = 2 if shape.activation == "swiglu" else 1
        self.up = 0.02 * jax.random.normal(k1, (halves, shape.mlp, shape.embed))
        self.up_bias = jnp.zeros((halves, shape.mlp)) if shape.bias else None
        scale = 0.02 / (2 * shape.layers) ** 0.5
        self.down = scale * jax.random.normal(k2, (shape.embed, shape.mlp))
        self.down_bias = jnp.zeros(shape.embed) if shape.bias else None

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        if size_of_axis("context") > 1:
            return self.apply(x)
        # With a single dim of rows, the weights' gradients are faster on CPUs.
        return self.apply(x.reshape(-1, x.shape[-1])).reshape(x.shape)

    def apply(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows embed"]:
        y = jnp.einsum("nme,...e->...nm", self.up, x)
        if self.up_bias is not None:
            y = y + self.up_bias
        if len(self.up) == 2:
            y = jax.nn.silu(y[..., 0, :]) * y[..., 1, :]
        else:
            y = jax.nn.gelu(y[..., 0, :])
        y = jnp.einsum("em,...m->...e", self.down, y)
        return y if self.down_bias is None else y + self.down_bias


class Experts(eqx.Module):
    router: Float[Array, "experts embed"]
    experts: MLP
    top_k: int = eqx.field(static=True)

    def __init__(self, shape: Shape, key: Key[Array, ""]):
        k1, k2 = jax.random.split(key)
        self.router = 0.02 * jax.random.normal(k1, (shape.experts, shape.embed))
        keys = jax.random.split(k2, shape.experts)
        self.experts = eqx.filter_vmap(lambda key: MLP(shape, key))(keys)
        self.top_k = shape.top_k

    def __call__(self, x):
        """Also returns the balance loss, which is larger if experts are used unevenly."""
        scores = jnp.einsum("xe,...se->...sx", self.router, x)
        mixed = eqxshard.parallel.mixture_of_experts(self.experts, x, scores, k=self.top_k)
        return mixed.output, mixed.balance_loss


class Block(eqx.Module):
    norm1: Norm
    attention: Attention
    norm2: Norm
    mlp: MLP | Experts
    dropout: eqx.nn.Dropout

    def __init__(self, shape: Shape, key: Key[Array, ""]):
        k1, k2 = jax.random.split(key)
        self.norm1, self.norm2 = Norm(shape), Norm(shape)
        self.attention = Attention(shape, k1)
        self.mlp = Experts(shape, k2) if shape.experts else MLP(shape, k2)
        self.dropout = eqx.nn.Dropout(shape.dropout)

    def __call__(self, x, positions, segments=None, *, key=None):
        """With experts, `x` is a pair: activations, and the sum of the balance losses."""
        x, balance = x if isinstance(self.mlp, Experts) else (x, None)
        x, more, _ = self.apply(x, positions, segments, None, key)
        return x if balance is None else (x, balance + more)

    def apply(self, x, positions, segments, cache, key=None):
        k1, k2 = split_key(key, x)
        y, cache = self.attention(self.norm1(x), positions, segments, cache)
        x = x + drop(self.dropout, y, k1)
        y = self.mlp(self.norm2(x))
        y, balance = y if isinstance(y, tuple) else (y, None)
        return x + drop(self.dropout, y, k2), balance, cache


class GPT(eqx.Module):
    embedding: Float[Array, "vocab embed"]
    position: Float[Array, "seq embed"] | None
    blocks: Block
    norm: Norm
    unembedding: Float[Array, "vocab embed"] | None
    dropout: eqx.nn.Dropout
    shape: Shape = eqx.field(static=True)
    remat: Remat = eqx.field(static=True)
    microbatches: int = eqx.field(static=True)

    def __init__(self, key, shape: Shape, remat: Remat = "dots", microbatches: int = 1):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        table = (shape.vocab_size, shape.embed)
        self.embedding = 0.02 * jax.random.normal(k1, table)
        self.position = None
        if shape.positions == "learned":
            self.position = 0.02 * jax.random.normal(k2, (shape.seq_len, shape.embed))
        keys = jax.random.split(k3, shape.layers)
        self.blocks = eqx.filter_vmap(lambda key: Block(shape, key))(keys)
        self.norm = Norm(shape)
        self.unembedding = None if shape.tied else 0.02 * jax.random.normal(k4, table)
        self.dropout = eqx.nn.Dropout(shape.dropout)
        self.shape = shape
        self.remat = remat
        self.microbatches = microbatches

    @property
    def head(self) -> tuple[Norm, Float[Array, "vocab embed"]]:
        return self.norm, self.embedding if self.unembedding is None else self.unembedding

    def embed(self, tokens, positions, key=None) -> Float[Array, "batch seq embed"]:
        if self.position is not None and tokens.shape[1] > len(self.position):
            raise eqxshard.UsageError(
                f"{tokens.shape[1]} tokens are more than the {len(self.position)} positions"
                " that the model has learned; cut them, or use a larger seq_len."
            )
        x = self.embedding[tokens]
        if self.position is not None:
            x = x + self.position[positions]
        x = eqxshard.constrain(x, P(("data", "fsdp"), "context"))
        return drop(self.dropout, x, split_key(key, x)[0])

    def hidden(self, tokens, positions=None, segments=None, key=None):
        """The activations after the last layer, and the mean of the balance losses."""
        positions = count_up(tokens) if positions is None else positions
        k1, k2 = (None, None) if key is None else jax.random.split(key)
        x, balance = self.embed(tokens, positions, k1), jnp.zeros(len(tokens))
        if size_of_axis("stage") > 1:
            x = eqxshard.parallel.pipeline(
                self.blocks,
                x,
                positions,
                segments,
                microbatches=self.microbatches,
                key=k2,
            )
            return x, balance
        carry = (x, balance) if self.shape.experts else x
        carry = eqxshard.scan_layers(
            self.blocks, carry, positions, segments, key=k2, remat=self.remat
        )
        x, balance = carry if self.shape.experts else (carry, balance)
        return x, balance / self.shape.layers

    def losses(self, tokens, targets, positions=None, segments=None, key=None):
        """Each example's mean loss over its targets."""
        x, balance = self.hidden(tokens, positions, segments, key)
        norm, out = self.head
        losses = nn.cross_entropy(norm(x), out, targets)
        count = jnp.maximum(jnp.sum(targets >= 0, -1), 1)  # -1: no target.
        return jnp.sum(losses, -1) / count + 0.01 * balance

    def logits(
        self, tokens, positions=None, segments=None
    ) -> Float[Array, "batch seq vocab"]:
        norm, out = self.head
        x, _ = self.hidden(tokens, positions, segments)
        return jnp.einsum("bse,ve->bsv", norm(x), out)

    def decode(self, tokens: Int[Array, "batch seq"], cache: KVCache):
        """The logits after the last token, and the cache with all tokens added."""
        positions = count_up(tokens) + cache.length[0]  # The same in all layers.

        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def apply(x, layer):
            arrays, cache = layer
            block = eqx.combine(arrays, static)
            x, _, cache = block.apply(x, positions, None, cache)
            return x, cache

        x, cache = jax.lax.scan(apply, self.embed(tokens, positions), (arrays, cache))
        norm, out = self.head
        return jnp.einsum("be,ve->bv", norm(x[:, -1]), out), cache


def flops_per_token(shape: Shape) -> float:
    """Floating-point operations of training on a token, with the experts that it uses."""
    # The key is made inside, so that JAX starts no device for it.
    model = eqx.filter_eval_shape(lambda: GPT(jax.random.key(0), shape))

    def count(tree):
        return sum(getattr(x, "size", 0) for x in jax.tree.leaves(tree))

    # Without the input's tables, which are looked up and not multiplied.
    parameters = count((model.blocks, model.head))
    if shape.experts:
        idle = 1 - shape.top_k / shape.experts
        parameters -= round(idle * count(model.blocks.mlp.experts))
    return nn.flops_per_token(
        parameters=parameters,
        seq=shape.seq_len,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
    )


def size_of_axis(axis: str) -> int:
    """The size of an axis of the mesh that this is compiled for; 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def count_up(tokens: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def split_key(key: Key[Array, ""] | None, x: Array):
    """Two keys for each example, the same ones as in a pipeline, which splits the key."""
    if key is None:
        return None, None
    if x.ndim == 2:
        return jax.random.split(key)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(x)))
    return jax.vmap(jax.random.split, out_axes=1)(keys)


def drop(dropout: eqx.nn.Dropout, x: Array, key: Key[Array, "*batch"] | None) -> Array:
    if key is None:
        return x
    if key.ndim:
        return jax.vmap(lambda row, row_key: dropout(row, key=row_key))(x, key)
    return dropout(x, key=key)
