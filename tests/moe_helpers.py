"""Experts, and their results: by `mixture_of_experts`, and by a loop of routes."""

import collections
import functools as ft
import itertools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from grades import graded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.parallel import mixture_of_experts

MESHES: dict[str, dict[str, Any]] = {
    "1": dict(data=1),
    "expert=2": dict(data=1, expert=2),
    "expert=4": dict(data=1, expert=4),
    "expert=8": dict(data=1, expert=8),
    "data=2,expert=4": dict(data=2, expert=4),
}
#: The meshes of tests that give a whole batch.
BATCH_MESHES: dict[str, dict[str, Any]] = {
    "data=2,fsdp=2": dict(data=2, fsdp=2),
    "fsdp=2,expert=4": dict(data=1, fsdp=2, expert=4),
    "data=2,fsdp=2,expert=2": dict(data=2, fsdp=2, expert=2),
    "data=2,tensor=2": dict(data=2, tensor=2),
}
#: By name: k and the capacity factor. The exchange takes up to four rounds and three.
CASES = {"dropless": (2, None), "capacity": (3, 1.0)}
QUICK = [("1", "dropless"), ("expert=8", "dropless"), ("data=2,expert=4", "capacity")]
SLOW = [("expert=2", "capacity"), ("expert=4", "capacity")]
ON_MESHES = graded(itertools.product(MESHES, CASES), QUICK, SLOW)
BATCH, TOKENS, EXPERTS, EMBED = 4, 16, 16, 4
ROWS, EXPERTS_SPLIT = P(("data", "fsdp")), P("expert")


def make_mesh(name):
    sizes = (MESHES | BATCH_MESHES)[name]
    count = math.prod(sizes.values())
    return eqxshard.make_mesh(**sizes, devices=jax.devices()[:count])


def make_experts(key, count):
    def make_expert(key):
        return eqx.nn.MLP(EMBED, EMBED, 8, 1, key=key)

    return eqx.filter_vmap(make_expert)(jax.random.split(key, count))


@ft.cache
def make_arrays(experts=EXPERTS):
    """The arrays of some experts; their other leaves are always `STATIC`."""
    return eqx.filter(make_experts(jax.random.key(0), experts), eqx.is_array)


STATIC = eqx.filter(
    eqx.filter_eval_shape(make_experts, jax.random.key(0), 1),
    lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct),
)


def make_inputs(experts=EXPERTS, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, TOKENS, EMBED)).astype(np.float32)
    logits = scale * rng.normal(size=(BATCH, TOKENS, experts)).astype(np.float32)
    return x, logits


# The reference: routes in a loop, and every expert on every token.


def routes(logits, k, capacity):
    """For one example: the experts each token chooses, and those that keep it."""
    tokens, experts = logits.shape
    choices = [sorted(range(experts), key=lambda e: (-row[e], e))[:k] for row in logits]
    limit = tokens if capacity is None else math.ceil(capacity * k * tokens / experts)
    taken = collections.Counter()
    chosen, kept = np.zeros((2, tokens, experts), bool)
    for order in range(k):
        for token in range(tokens):
            expert = choices[token][order]
            chosen[token, expert] = True
            kept[token, expert] = taken[expert] < limit
            taken[expert] += 1
    return chosen, kept


@ft.partial(jax.jit, static_argnames="normalise")
def masked_mixtures(args, chosen, kept, normalise):
    """The mixtures of a batch, from masks, and the gradients of their `scalar`."""

    def loss(args):
        experts, x, logits = args
        probs = jax.nn.softmax(logits)
        gates = jnp.where(chosen, probs, 0)
        if normalise:
            gates = gates / jnp.sum(gates, axis=2, keepdims=True)
        apply = eqx.filter_vmap(lambda expert: jax.vmap(jax.vmap(expert))(x), out_axes=2)
        all_outputs = apply(eqx.combine(experts, STATIC))
        output = jnp.sum(jnp.where(kept, gates, 0)[..., None] * all_outputs, axis=2)
        shares = jnp.mean(chosen, axis=1, dtype=jnp.float32)
        shares = shares / jnp.sum(shares, axis=1, keepdims=True)
        balance_loss = probs.shape[2] * jnp.sum(shares * jnp.mean(probs, axis=1), axis=1)
        return scalar(output, balance_loss), (output, balance_loss)

    return jax.value_and_grad(loss, has_aux=True)(args)


def scalar(output, balance_loss):
    """A scalar that has a gradient for every element."""
    return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(balance_loss)


def reference(experts, x, logits, k, capacity):
    """The expected result of `backward`."""
    masks = [routes(np.asarray(rows), k, capacity) for rows in logits]
    chosen, kept = (np.stack(mask) for mask in zip(*masks))
    (_, out), grads = masked_mixtures((experts, x, logits), chosen, kept, k > 1)
    dropped = 1 - np.sum(kept, axis=(1, 2)) / (k * TOKENS)
    return (*out, dropped), grads


# The function under test


def on_mesh(mesh, fn, *args, split=(EXPERTS_SPLIT, ROWS, ROWS)):
    """A function of experts, tokens and logits on a mesh, and its compiled form."""

    def fn_on_mesh(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args)

    shardings = tuple(NamedSharding(mesh, spec) for spec in split)
    jitted = jax.jit(fn_on_mesh, in_shardings=shardings)
    compiled = jitted.lower(*args).compile()

    def run(*args):
        return compiled(*jax.device_put(args, shardings))

    return run, compiled


def forward(experts, x, logits, k, capacity):
    experts = eqx.combine(experts, STATIC)

    def one(x, logits):
        return mixture_of_experts(experts, x, logits, k=k, capacity=capacity)

    return jax.vmap(one)(x, logits)


def forward_batch(experts, x, logits, k, capacity):
    """Like `forward`, for the whole batch."""
    experts = eqx.combine(experts, STATIC)
    return mixture_of_experts(experts, x, logits, k=k, capacity=capacity)


def backward(*args, k, capacity, forward=forward):
    def loss(args):
        out = forward(*args, k=k, capacity=capacity)
        return scalar(out.output, out.balance_loss), tuple(out)

    (_, out), grads = jax.value_and_grad(loss, has_aux=True)(args)
    return out, grads


@ft.cache
def compiled_on(mesh, k, capacity, experts=EXPERTS, fn=backward):
    """Like `on_mesh`, but compiled once for all tests."""
    args = (make_arrays(experts), *make_inputs(experts))
    return on_mesh(make_mesh(mesh), ft.partial(fn, k=k, capacity=capacity), *args)


@ft.cache
def batch_on(name, case):
    """The gradients of a mixture that is given the whole batch, on a mesh."""
    k, capacity = CASES[case]
    experts = P("expert" if "expert" in name else None)
    fn = ft.partial(backward, k=k, capacity=capacity, forward=forward_batch)
    args = (make_arrays(), *make_inputs())
    return on_mesh(make_mesh(name), fn, *args, split=(experts, ROWS, ROWS))


def assert_close(ours, theirs, tolerance=1e-6):
    """Compare, relative to an array's largest element or to 1."""
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for one, other in zip(ours, theirs, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = max(1, np.max(np.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)
