"""Meshes in context, and a model of stacked layers in a pipeline."""

import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.parallel import pipeline
from eqxshard.sharding import batch_sharding

WIDTH, LAYERS, ROWS = 16, 8, 32
KEY = jax.random.key(7)
#: Programs that run for milliseconds should not compile for seconds.
UNOPTIMISED: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
RULE = eqxshard.first_match(
    eqxshard.by_path({r"^layers\.": P("stage")}), eqxshard.replicate()
)


class Layer(eqx.Module):
    """A hard layer for pipelines: not defined at zero, dropout, arrays of integers."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    order: jax.Array
    activation: Callable[..., Any]

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=key)
        self.dropout = eqx.nn.Dropout(0.2)
        self.order = jnp.arange(WIDTH)[::-1]
        self.activation = jnp.tanh

    def __call__(self, h, places, key=None):
        unit = jnp.roll(h[self.order], places["shift"]) / jnp.linalg.norm(h)
        return h + self.dropout(self.activation(self.linear(unit)), key=key)


class Apply(eqx.Module):
    """A layer that is a function of its parameter and the activations."""

    param: jax.Array
    fn: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, h, *args):
        return self.fn(self.param, h, *args)


class Head(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(WIDTH, 4, use_bias=False, key=key)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, h, key=None):
        return self.linear(self.dropout(h, key=key))


class Model(eqx.Module):
    embed: eqx.nn.Linear
    layers: Layer
    head: Head

    def __init__(self, key, layers=LAYERS):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(8, WIDTH, key=k1)
        self.layers = eqx.filter_vmap(Layer)(jax.random.split(k2, layers))
        self.head = Head(k3)


@ft.cache
def make_model():
    return eqx.filter_jit(Model)(KEY)


def squared_error(head, h, target, key=None):
    return jnp.sum((head(h, key=key) - target) ** 2)


def losses_of(model, batch, key, microbatches):
    h = pipeline(
        model.layers,
        jax.vmap(model.embed)(batch["x"]),
        batch["places"],
        microbatches=microbatches,
        key=key,
    )
    keys = None
    if key is not None:
        key = jax.random.fold_in(key, LAYERS)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(len(h)))
    return jax.vmap(ft.partial(squared_error, model.head))(h, batch["y"], keys)


def mean_loss(model, batch, key, microbatches):
    """The mean that a step takes."""
    losses = losses_of(model, batch, key, microbatches)
    return jnp.sum(losses * batch["__weight__"]) / jnp.sum(batch["__weight__"])


def make_mesh(**sizes):
    sizes = {"data": 1, **sizes}
    return eqxshard.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def make_batch(rows=ROWS, seed=0) -> dict[str, Any]:
    # Some examples count twice, some not at all.
    batch = helpers.make_batch(rows, seed, weight=np.arange(rows) % 3)
    return batch | {"places": {"shift": np.arange(rows) % 5, "none": None}}


def on(mesh, fn):
    """Call `fn` as in a step on a mesh, or without one."""
    if mesh is None:
        return fn

    def inside(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args)

    return inside


def compile_grad(mesh, microbatches):
    """The compiled gradient, and a function that runs it."""
    model, batch, key = make_model(), make_batch(), jax.random.key(1)
    if mesh is not None:
        model = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, RULE))
        batch = jax.device_put(batch, batch_sharding(mesh))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch, key):
        model = eqx.combine(params, static)
        # Squared, so that the gradient that comes back is not 1.
        return mean_loss(model, batch, key, microbatches) ** 2

    grad = jax.jit(jax.value_and_grad(on(mesh, loss)))
    compiled = grad.lower(params, batch, key).compile(UNOPTIMISED)
    return compiled, lambda: compiled(params, batch, key)


@ft.cache
def expected():
    """The loss and gradients on one device."""
    _, run = compile_grad(None, 1)
    return run()


@ft.cache
def pipelined(microbatches, **sizes):
    compiled, run = compile_grad(make_mesh(**sizes), microbatches)
    return compiled, run()


def relative(tree, other):
    """The largest difference in a PyTree, relative to the largest value of its leaf.

    Over the shards of all devices, because replicas could differ.
    """
    found = []
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    for leaf, expected in pairs:
        expected = np.asarray(expected)
        for part in jnp.asarray(leaf).addressable_shards:
            difference = np.abs(np.asarray(part.data) - expected[part.index])
            found.append(np.max(difference) / np.max(np.abs(expected)))
    return np.max(found)  # nan if one of them is


def trace(fn, **sizes):
    """Trace a function on a mesh, which finds mistakes before anything is compiled."""
    return jax.eval_shape(on(make_mesh(**sizes), fn))
