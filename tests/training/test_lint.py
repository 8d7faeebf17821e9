"""Steps are linted when they first compile, and compile once all the same; rules, too."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiles
from jax import P
from lint_helpers import FSDP, KEY, MLP, OPTIM, found, make_mesh, square_losses

import eqxshard
from eqxshard.training._lint import lint_model

#: Every step of this model has a finding: no dim of its weights divides by 8.
BATCH = {"x": np.ones((16, 9), np.float32)}


def make_state():
    return eqxshard.init_state(
        lambda key: MLP(key, width=17, size=9),
        OPTIM,
        key=KEY,
        mesh=make_mesh(fsdp=8),
        rule=FSDP,
    )


def make_step(**options):
    return eqxshard.make_train_step(square_losses, OPTIM, **options)


def test_a_finding_is_a_warning_once_and_the_step_compiles_once():
    state, step = make_state(), make_step()
    # A step that was lowered before is linted, too.
    step.lower(state, BATCH)
    with compiles("train_step") as events:
        with pytest.warns(eqxshard.LintWarning, match=r"up float32\[17,9\] is whole on"):
            state, _ = step(state, BATCH)
        for _ in range(3):
            state, _ = step(state, BATCH)
    assert events == ["backend_compile_duration"]


def test_an_error_is_raised_before_anything_is_donated():
    state, step = make_state(), make_step(lint={"whole": "error"})
    for _ in range(2):
        with pytest.raises(ValueError, match="the train step of square_losses, whole: "):
            step(state, BATCH)
    make_step(lint={"whole": "off"})(state, BATCH)


def test_several_steps_and_resident_batches_are_linted():
    batches = {"x": np.ones((2, 16, 9), np.float32)}
    source = eqxshard.data.ArraySource(BATCH)
    loader = eqxshard.Loader(
        source, batch_size=16, mesh=make_mesh(fsdp=8), placement="device"
    )
    for several in (batches, loader.stacked(1)):
        with pytest.warns(eqxshard.LintWarning, match="is whole on every device"):
            make_step().many(make_state(), several)


def test_an_eval_step_is_linted_once():
    model = make_state().model
    table = np.ones((512, 512), np.float32)

    def metric_fn(model, batch):
        product = batch["x"] @ jnp.asarray(table)[:9]
        return {"value": jax.vmap(model)(batch["x"]).sum(-1) + product[:, 0]}

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
        make_step(lint={"whole": "off"})(make_state(), BATCH)


# Rules


def check(rule, make_model: Any, **sizes: Any):
    model = eqx.filter_eval_shape(make_model, KEY)
    return list(lint_model(model, make_mesh(**sizes), rule))


def odd(key):
    return MLP(key, width=257, size=65)


@pytest.mark.parametrize(
    "rule", [FSDP, eqxshard.combine(eqxshard.by_path({"up": P()}), FSDP)]
)
def test_arrays_that_do_not_divide(rule):
    findings = check(rule, odd, fsdp=8)
    assert [each.leaf for each in findings] == ["up", "down"]
    assert {each.kind for each in findings} == {"whole"}
    assert "no dim of (257, 65) divides by fsdp=8" in findings[0].message
    # Everything may be whole on a mesh of another axis, and vectors anywhere.
    assert check(rule, odd, data=8) == []
    assert check(FSDP, lambda key: eqx.nn.LayerNorm(9), fsdp=8) == []


def test_an_array_that_is_split_over_another_axis_is_not_whole():
    rule = eqxshard.combine(eqxshard.by_path({".*": P("tensor")}), FSDP)
    assert check(rule, lambda key: MLP(key, width=258, size=66), fsdp=4, tensor=2) == []


def test_a_rule_that_was_not_checked_when_the_state_was_made():
    mesh = make_mesh(fsdp=8)
    state = eqxshard.abstract_state(MLP, OPTIM, key=KEY, mesh=mesh, rule=FSDP)
    misspelt = eqxshard.first_match(eqxshard.by_path({"upp": P()}), FSDP)
    step = eqxshard.make_train_step(square_losses, OPTIM, rule=misspelt)
    findings = eqxshard.lint(step, state, {"x": np.ones((16, 64), np.float32)})
    found(findings, "unmatched", "'upp' matches no leaf", "did you mean 'up'")
