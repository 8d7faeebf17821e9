"""Several states in one `fit`, and companions of its steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import loop_helpers
import pytest
from fit_helpers import new_state, train_step
from helpers import (
    Model,
    assert_equal,
    copied,
    make_loader,
    make_mesh,
)
from loop_helpers import Recorder

import eqxshard
from eqxshard.callbacks import Every
from eqxshard.training import Metrics

_ = train_step  # A fixture.


def both(train_step):
    """A step of two states: one of each in turn."""

    def step(states, batch):
        first, metrics = train_step(states["first"], batch)
        second, others = train_step(states["second"], batch)
        totals = {"first/loss": metrics.totals["loss"]}
        totals["second/loss"] = others.totals["loss"]
        joined = Metrics(totals, metrics.weight, metrics.nonfinite)
        return {"first": first, "second": second}, joined

    return step


def two_states():
    return {"first": new_state(), "second": new_state()}


def test_several_states_are_stepped_saved_and_resumed(train_step, tmp_path):
    seen, recorder = [], Recorder()

    def evaluate(models):
        seen.append({name: type(model) for name, model in models.items()})
        return {"sum": float(sum(jnp.sum(m.last.bias) for m in models.values()))}

    states = two_states()
    bias = states["second"].model.last.bias + 1
    states = eqx.tree_at(lambda s: s["second"].model.last.bias, states, bias)
    alone = copied(states)
    checkpointer = eqxshard.Checkpointer(tmp_path, best="eval/sum", mode="max")
    options: dict = {"evaluate": evaluate, "checkpointer": checkpointer}
    step = both(train_step)
    part = eqxshard.fit(states, step, make_loader(), steps=3, **options)
    assert seen == [{"first": Model, "second": Model}]
    described = checkpointer.description(3)
    assert "second.opt_state.0.mu.last.bias" in described["leaves"]
    part = checkpointer.restore(part)
    options["trackers"] = [recorder]
    whole = eqxshard.fit(part, step, make_loader(), steps=6, **options)
    assert checkpointer.steps()[-1] == 6
    for name, state in alone.items():
        assert_equal(whole[name], eqxshard.fit(state, train_step, make_loader(), steps=6))
    losses = [name for name in recorder.lines[-1][1] if "loss" in name]
    assert losses == ["train/first/loss", "train/second/loss"]
    model = checkpointer.restore_model(whole["first"].model, of="second")
    assert_equal(model, whole["second"].model)


def test_several_states_must_count_alike(train_step):
    states = two_states()
    states["second"], _ = train_step(states["second"], next(iter(make_loader())))
    with pytest.raises(ValueError, match="but first is at step 0, second is at step 1; le"):
        eqxshard.fit(states, both(train_step), make_loader(), steps=3)

    def twice(state, batch):
        return train_step(train_step(state, batch)[0], batch)

    with pytest.raises(ValueError, match="of step 2, and the run is at step 1; let"):
        eqxshard.fit(new_state(), twice, make_loader(), steps=3)


def test_of_several_states_the_error_says_how_to_look_into_one(train_step, tmp_path):
    def nonfinite(states, batch):
        states, metrics = both(train_step)(states, batch)
        return states, eqx.tree_at(lambda m: m.nonfinite, metrics, jnp.int32(1))

    with pytest.raises(FloatingPointError, match="first_nonfinite for one of the states"):
        eqxshard.fit(
            two_states(),
            nonfinite,
            make_loader(),
            steps=4,
            max_nonfinite=2,
            checkpointer=eqxshard.Checkpointer(tmp_path),
        )
    assert eqxshard.Checkpointer(tmp_path).steps() == [4]


# Companions of steps


def follow(model, batch, key, target):
    """The squared distance of a model's outputs from a target's, plus 1."""
    return (jax.vmap(model)(batch["x"]) - jax.vmap(target)(batch["x"]) - 1) ** 2


def follower(seed=0):
    where = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
    return eqxshard.init_state(
        loop_helpers.Layers, loop_helpers.OPTIM, key=jax.random.key(seed), **where
    )


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["host", "device"])
def test_fit_gives_each_step_the_companion(placement):
    train_step = eqxshard.make_train_step(follow, loop_helpers.OPTIM)
    target = follower(1).model
    expected = follower()
    for batch in loop_helpers.make_loader(epochs=1):
        expected, _ = train_step(expected, batch, target)
    loader = loop_helpers.make_loader(placement=placement)
    state = eqxshard.fit(follower(), train_step, loader, epochs=1, extra=target)
    assert_equal(state, expected)


def test_a_callback_replaces_the_companion():
    train_step = eqxshard.make_train_step(follow, loop_helpers.OPTIM)
    synced = []

    def sync(loop):
        loop.extra = loop.state.model
        synced.append(loop.step)

    recorder = Recorder()
    state = follower()
    eqxshard.fit(
        state,
        train_step,
        loop_helpers.make_loader(),
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
