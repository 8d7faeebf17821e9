"""A transformer written for Explicit axes, and the same one for plain arrays."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import eqxshard

VOCAB, EMBED, HEADS, SEQ, MLP = 64, 32, 4, 8, 64


class Block(eqx.Module):
    """One layer: `rows` says how the batch is split, and is `None` for plain arrays."""

    qkv: Float[Array, "embed three heads dim"]
    out: Float[Array, "heads dim embed"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    scale: Float[Array, " embed"]
    typed: bool = eqx.field(static=True)

    def __init__(self, key, typed):
        keys, dim = jax.random.split(key, 4), EMBED // HEADS
        self.qkv = jax.random.normal(keys[0], (EMBED, 3, HEADS, dim)) / 6
        self.out = jax.random.normal(keys[1], (HEADS, dim, EMBED)) / 6
        self.up = jax.random.normal(keys[2], (EMBED, MLP)) / 6
        self.down = jax.random.normal(keys[3], (MLP, EMBED)) / 8
        self.scale, self.typed = jnp.ones(EMBED), typed

    def __call__(self, x):
        # Products over heads, or over the hidden dim, are over dims that tensor may split.
        typed: Any = (
            {"out_sharding": P(jax.typeof(x).sharding.spec[0])} if self.typed else {}
        )
        h = x * self.scale / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.moveaxis(jnp.einsum("bse,ethd->btshd", h, self.qkv), 1, 0)
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / 3
        seen = jnp.tril(jnp.ones((SEQ, SEQ), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        heads = jnp.einsum("bhst,bthd->bshd", weights, v)
        x = x + jnp.einsum("bshd,hde->bse", heads, self.out, **typed)
        hidden = jax.nn.gelu(jnp.einsum("bse,em->bsm", x, self.up))
        return x + jnp.einsum("bsm,me->bse", hidden, self.down, **typed)


class Model(eqx.Module):
    table: Float[Array, "vocab embed"]
    blocks: Block
    head: Float[Array, "embed vocab"]
    typed: bool = eqx.field(static=True)

    def __init__(self, key, typed, depth=2):
        keys = jax.random.split(key, 3)
        self.table = jax.random.normal(keys[0], (VOCAB, EMBED))
        make = ft.partial(Block, typed=typed)
        self.blocks = eqx.filter_vmap(make)(jax.random.split(keys[1], depth))
        self.head = jax.random.normal(keys[2], (EMBED, VOCAB)) / 6
        self.typed = typed

    def __call__(self, tokens):
        if self.typed:
            rows = jax.typeof(tokens).sharding.spec[0]
            x = self.table.at[tokens].get(out_sharding=P(rows))
        else:
            x = self.table[tokens]
        return eqxshard.scan_layers(self.blocks, x) @ self.head


def loss_fn(model, batch, key):
    logits = model(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses, -1)


def metric_fn(model, batch):
    return {"loss": loss_fn(model, batch, None)}


def batches(count=3):
    rng = np.random.default_rng(0)
    draw = lambda: rng.integers(0, VOCAB, (16, SEQ)).astype(np.int32)  # noqa: E731
    return [{"tokens": draw(), "targets": draw()} for _ in range(count)]


def make_state(mesh, rule, typed, optim):
    return eqxshard.init_state(
        lambda key: Model(key, typed), optim, key=jax.random.key(0), mesh=mesh, rule=rule
    )


def losses(mesh, rule, typed, **options):
    """The loss of each step, and of an evaluation after them."""
    optim = optax.adamw(1e-2)
    state = make_state(mesh, rule, typed, optim)
    step = eqxshard.make_train_step(loss_fn, optim, **options)
    found = []
    for batch in batches():
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    evaluate = eqxshard.make_eval_step(metric_fn)
    return np.array([*found, float(evaluate(state.model, batches()[0])["loss"])])
