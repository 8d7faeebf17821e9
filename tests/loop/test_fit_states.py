"""Several states in one `fit`."""

import equinox as eqx
import jax.numpy as jnp
import pytest
from fit_helpers import new_state, train_step
from helpers import (
    Model,
    assert_equal,
    copied,
    make_loader,
)
from loop_helpers import Recorder

import eqxshard

_ = train_step  # A fixture.


def both(train_step):
    """A step of two states: one of each in turn."""

    def step(states, batch):
        first, metrics = train_step(states["first"], batch)
        second, others = train_step(states["second"], batch)
        totals = {"first/loss": metrics.totals["loss"]}
        totals["second/loss"] = others.totals["loss"]
        joined = eqxshard.Metrics(totals, metrics.weight, metrics.nonfinite)
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
    checkpointer = eqxshard.Checkpointer(tmp_path, best="eval/sum")
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


def test_several_states_get_no_crash_dump(train_step, tmp_path):
    def nonfinite(states, batch):
        states, metrics = both(train_step)(states, batch)
        return states, eqx.tree_at(lambda m: m.nonfinite, metrics, jnp.int32(1))

    with pytest.raises(FloatingPointError, match="a crash dump is of one state; train"):
        eqxshard.fit(
            two_states(),
            nonfinite,
            make_loader(),
            steps=4,
            max_nonfinite=2,
            checkpointer=eqxshard.Checkpointer(tmp_path),
        )
    assert eqxshard.Checkpointer(tmp_path).steps() == [4]
