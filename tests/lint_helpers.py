"""A small model whose weights are just large enough to be linted, and lint of its step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxshard

OPTIM = optax.sgd(1e-3)
KEY = jax.random.key(0)


class MLP(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, key, width=256, size=64):
        self.up = jax.random.normal(key, (width, size)) / 8
        self.down = jax.random.normal(key, (size, width)) / 16

    def __call__(self, x):
        return self.down @ jnp.tanh(self.up @ x)


def square_losses(model, batch, key):
    return jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)


BATCH = {"x": np.ones((512, 64), np.float32)}
FSDP = eqxshard.fsdp(min_size=1)


def make_mesh(**sizes):
    return eqxshard.make_mesh(**{"data": 1, **sizes})


def make_state(
    make_model: Any = MLP,
    rule: Any = FSDP,
    *,
    optim: Any = OPTIM,
    precision=None,
    **sizes: Any,
):
    """An abstract state."""
    return eqxshard.abstract_state(
        make_model, optim, key=KEY, mesh=make_mesh(**sizes), rule=rule, precision=precision
    )


def lint(
    make_model: Any = MLP,
    loss_fn=square_losses,
    batch: Any = BATCH,
    rule: Any = FSDP,
    *,
    optim: Any = OPTIM,
    precision=None,
    nonfinite: Any = "skip",
    **sizes: Any,
):
    """The findings in a step, without running it."""
    state = make_state(make_model, rule, optim=optim, precision=precision, **sizes)
    step = eqxshard.make_train_step(loss_fn, optim, nonfinite=nonfinite)
    return eqxshard.lint(step, state, batch)


def found(findings, kind, *texts):
    """The one finding, of this kind, whose message has these texts."""
    (finding,) = findings
    assert finding.kind == kind
    for text in texts:
        assert text in finding.message
    return finding
