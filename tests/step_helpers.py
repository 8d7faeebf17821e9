"""Train steps for the tests of training: made once, for each mesh, rule and loss."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import RULES, Model, copied, lenient, make_batch, make_mesh, squared_errors

import eqxshard
from eqxshard.training.rewrite._interpreter import Interpreter, run_rewritten

OPTIM = lenient(optax.adam(1e-2))
KEY = jax.random.key(0)
#: A mesh that replicates, and one that splits.
SPLITS = [("data=8", "replicate"), ("data=2,fsdp=4", "fsdp")]
WEIGHTS = {"even": None, "padded": np.arange(32) < 27, "uneven": np.linspace(0, 3, 32)}


def place(mesh, rule) -> dict[str, Any]:
    """A mesh and a rule by name."""
    return {"mesh": make_mesh(mesh), "rule": RULES.get(rule, rule)}


@functools.cache
def first_state(mesh, rule, optim, make_model, **kept):
    """The state that tests begin with copies of: making one takes ten programs."""
    return eqxshard.init_state(make_model, optim, key=KEY, **place(mesh, rule), **kept)


def make(
    mesh, rule, loss_fn=squared_errors, optim=OPTIM, make_model: Any = Model, **options
):
    """A state, and a step that is not compiled yet."""
    kept = {name: options[name] for name in ("trainable", "precision") if name in options}
    state = copied(first_state(mesh, rule, optim, make_model, **kept))
    train_step = eqxshard.make_train_step(loss_fn, optim, **place(mesh, rule), **options)
    return state, train_step


make_once = functools.cache(make)


def setup(mesh="data=8", rule="replicate", **options):
    """A fresh state, and a step that may be compiled already."""
    state, train_step = make_once(mesh, rule, **options)
    return copied(state), train_step


def train(make_model, loss_fn, mesh, rule, *, optim=OPTIM, steps=3, batch=None, **options):
    """The losses of some steps, the state after them, and the step."""
    state, train_step = make(mesh, rule, loss_fn, optim, make_model=make_model, **options)
    losses = []
    for seed in range(steps):
        state, metrics = train_step(state, batch or make_batch(seed=seed))
        losses.append(metrics.compute()["loss"])
    return losses, state, train_step


def without_dropout(model, batch, key):
    """The losses of `squared_errors`, which then do not depend on the key."""
    return squared_errors(eqx.nn.inference_mode(model), batch, key)


def with_nan(batch):
    """A batch of which one row is NaN."""
    return {**batch, "x": np.where(np.arange(32)[:, None] == 7, np.nan, batch["x"])}


def mean_of_x(model, batch):
    """Metrics: of the batch, of the model without dropout, and a scalar."""
    out = jax.vmap(lambda x: model(x, key=jax.random.key(0)))(batch["x"])
    return {"x": batch["x"][:, 0], "out": out[:, 0], "scalar": jnp.float32(3)}


class Wide(eqx.Module):
    """A model whose width is only in the shape of its array."""

    weight: jax.Array

    def __call__(self, x, key):
        return jnp.tanh(x @ self.weight) @ self.weight.T[:, :4]


def call_rewritten(fn, rule, *args):
    """Call a function with its jaxpr rewritten by a rule, as a step does."""
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    return run_rewritten(Interpreter([rule]).rewrite, jaxpr, out, args)[0]
