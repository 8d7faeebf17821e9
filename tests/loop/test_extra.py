"""Companions of a run's steps."""

import jax
import pytest
from helpers import assert_equal, make_mesh
from loop_helpers import OPTIM, Layers, Recorder, make_loader

import eqxshard
from eqxshard.callbacks import Every


def follow(model, batch, key, target):
    """The squared distance of a model's outputs from a target's, plus 1."""
    return (jax.vmap(model)(batch["x"]) - jax.vmap(target)(batch["x"]) - 1) ** 2


def new_state(seed=0):
    where = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    return eqxshard.init_state(Layers, OPTIM, key=jax.random.key(seed), **where)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["host", "device"])
def test_fit_gives_each_step_the_companion(placement):
    train_step = eqxshard.make_train_step(follow, OPTIM)
    target = new_state(1).model
    expected = new_state()
    for batch in make_loader(epochs=1):
        expected, _ = train_step(expected, batch, target)
    loader = make_loader(placement=placement)
    state = eqxshard.fit(new_state(), train_step, loader, epochs=1, extra=target)
    assert_equal(state, expected)


def test_a_callback_replaces_the_companion():
    train_step = eqxshard.make_train_step(follow, OPTIM)
    synced = []

    def sync(loop):
        loop.extra = loop.state.model
        synced.append(loop.step)

    recorder = Recorder()
    state = new_state()
    eqxshard.fit(
        state,
        train_step,
        make_loader(),
        steps=6,
        extra=state.model,
        callbacks=[Every(2, sync)],
        trackers=[recorder],
        log_every=1,
    )
    assert synced == [2, 4, 6]
    losses = [values["train/loss"] for _, values in recorder.lines]
    # Where the model is its own target, the distance is 0.
    assert losses[0] == losses[2] == losses[4] == 1.0
    assert all(abs(loss - 1.0) > 1e-6 for loss in losses[1::2])
