"""Steps are linted when they first compile, and compile once all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiles
from lint_helpers import BATCH, FSDP, KEY, MLP, OPTIM, make_mesh, square_losses

import eqxshard

ON_ONE = {"x": jnp.asarray(BATCH["x"])}


def make_state():
    return eqxshard.init_state(MLP, OPTIM, key=KEY, mesh=make_mesh(fsdp=8), rule=FSDP)


def test_a_finding_is_a_warning_once_and_the_step_compiles_once():
    state = make_state()
    step = eqxshard.make_train_step(square_losses, OPTIM)
    with compiles("train_step") as events:
        with pytest.warns(
            eqxshard.LintWarning, match=r"batch\.x \(512, 64\) arrives whole"
        ):
            state, _ = step(state, ON_ONE)
        for _ in range(3):
            state, _ = step(state, ON_ONE)
    assert sorted(events) == [
        "backend_compile_duration",
        "jaxpr_to_mlir_module_duration",
        "jaxpr_trace_duration",
    ]


def test_an_error_is_raised_before_anything_is_donated():
    state = make_state()
    step = eqxshard.make_train_step(square_losses, OPTIM, lint={"batch": "error"})
    for _ in range(2):
        with pytest.raises(ValueError, match="the train step of square_losses, batch: "):
            step(state, ON_ONE)
    state, _ = step(state, BATCH)
    # What was linted is not linted again.
    step(state, ON_ONE)


def test_nothing_is_said_when_it_is_off():
    step = eqxshard.make_train_step(square_losses, OPTIM, lint={"batch": "off"})
    step(make_state(), ON_ONE)
    step = eqxshard.make_train_step(square_losses, OPTIM, lint="off")
    step(make_state(), ON_ONE)


def test_a_step_that_was_lowered_before_is_linted():
    state = make_state()
    step = eqxshard.make_train_step(square_losses, OPTIM)
    step.lower(state, ON_ONE)
    with pytest.warns(eqxshard.LintWarning, match="arrives whole"):
        step(state, ON_ONE)


def test_several_steps_and_resident_batches_are_linted():
    state = make_state()
    step = eqxshard.make_train_step(square_losses, OPTIM)
    batches = {"x": jnp.asarray(np.ones((2, 512, 64), np.float32))}
    with pytest.warns(eqxshard.LintWarning, match=r"batch\.x \(2, 512, 64\)"):
        state, _ = step.many(state, batches)
    source = eqxshard.data.ArraySource(BATCH)
    loader = eqxshard.Loader(source, batch_size=64, mesh=make_mesh(fsdp=8), epochs=1)
    for batch in loader:
        state, _ = step(state, batch)


def test_an_eval_step_is_linted_once():
    model = make_state().model
    table = np.ones((512, 512), np.float32)

    def metric_fn(model, batch):
        return {
            "value": jax.vmap(model)(batch["x"]).sum(-1)
            + (batch["x"] @ jnp.asarray(table)[:64])[:, 0]
        }

    step = eqxshard.make_eval_step(metric_fn)
    with pytest.warns(eqxshard.LintWarning, match="eval step of metric_fn, constant: "):
        step(model, BATCH)
    step(model, BATCH)
    with pytest.raises(ValueError, match="constant"):
        eqxshard.make_eval_step(metric_fn, lint="error")(model, BATCH)


def test_a_step_that_lint_cannot_read_runs(monkeypatch):
    def broken(*_):
        raise KeyError("dimension_numbers")

    monkeypatch.setattr("eqxshard.training._lint.lint_jaxpr", broken)
    with pytest.warns(RuntimeWarning, match="lint could not read a step"):
        eqxshard.make_train_step(square_losses, OPTIM)(make_state(), BATCH)
