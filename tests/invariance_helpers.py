"""A small model that tests of `eqxshard.testing` train, and its losses."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from helpers import make_batch

import eqxshard

SGD = optax.sgd(0.1)


class Affine(eqx.Module):
    """The softmax of its outputs is independent of `shift`, whose gradient is rounding."""

    weight: jax.Array
    bias: jax.Array
    shift: jax.Array

    def __init__(self, key, width=4):
        # Random numbers take long to compile.
        self.weight = jnp.sin(jnp.arange(8.0 * width).reshape(width, 8))
        self.bias = jnp.zeros(width)
        self.shift = jnp.zeros(8)

    def __call__(self, x):
        return self.weight @ x + self.bias + jnp.sum(self.shift)


def squares(model, batch, key):
    return jnp.sum((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def cross_entropies(model, batch, key):
    labels = jnp.argmax(batch["y"], axis=-1)
    logits = jax.vmap(model)(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def check_invariant(**options: Any):
    """Call `assert_mesh_invariant`, by default with a correct model on two devices."""
    model = {"make_model": Affine, "loss_fn": squares, "batch": make_batch(), "optim": SGD}
    small = {"rules": eqxshard.replicate(), "meshes": [{"data": 2}], "steps": 2}
    return eqxshard.testing.assert_mesh_invariant(**{**model, **small, **options})
