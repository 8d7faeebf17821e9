"""The training loop of Equinox's documentation, on one device, to compare with."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from helpers import arrays


class Plain(NamedTuple):
    """The losses of a run, and what it trained."""

    losses: list[float]
    model: Any
    model_state: Any


def start(model, optim):
    return optim.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def step(loss_fn, optim, model, model_state, opt_state, batch, key, *extra):
    """One step: `(model, model_state, opt_state, loss)`."""

    def mean_loss(model):
        if model_state is None:
            return jnp.mean(loss_fn(model, batch, key, *extra)), None
        losses, new_state = loss_fn((model, model_state), batch, key, *extra)
        return jnp.mean(losses), new_state

    grad = eqx.filter_value_and_grad(mean_loss, has_aux=True)
    (loss, model_state), grads = grad(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optim.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), model_state, opt_state, loss


def train(loss_fn, optim, model, model_state, batches, key, *extra):
    """Train on some batches; `key` is that of a state, and step `i` folds in `i`."""
    opt_state = start(model, optim)
    losses = []
    for number, batch in enumerate(batches):
        args = opt_state, batch, jax.random.fold_in(key, number), *extra
        model, model_state, opt_state, loss = step(
            loss_fn, optim, model, model_state, *args
        )
        losses.append(float(loss))
    return Plain(losses, model, model_state)


def on_one_device(tree):
    """Copies of the arrays of a PyTree, which a step may donate."""
    split, rest = eqx.partition(tree, eqx.is_array)
    device = jax.devices()[0]
    copied = jax.tree.map(lambda leaf: jnp.copy(jax.device_put(leaf, device)), split)
    return eqx.combine(copied, rest)


def nudge(model, seed=0):
    """Move each weight by one unit in its last place, up or down at random."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        if not eqx.is_inexact_array(leaf):
            return leaf
        infinities = np.array([-np.inf, np.inf], leaf.dtype)
        towards = rng.choice(infinities, size=leaf.shape)
        return jnp.nextafter(leaf, towards)

    return jax.tree.map(one, model)


def differences(tree, other):
    """By path, the norm of the difference of two arrays relative to that of the other."""
    ours, theirs = arrays(tree), arrays(other)
    assert ours.keys() == theirs.keys()
    return {
        path: np.linalg.norm(np.float64(array) - theirs[path])
        / np.maximum(np.linalg.norm(np.float64(theirs[path])), 1e-30)
        for path, array in ours.items()
    }
