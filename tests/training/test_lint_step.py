"""Steps are linted when they first compile, and compile once all the same."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiles
from jax import P
from jax.experimental import io_callback
from lint_helpers import FSDP, KEY, MLP, OPTIM, found, lint, make_mesh, square_losses

import eqxshard
from eqxshard.inspect import LintWarning
from eqxshard.sharding._placement import named_leaves
from eqxshard.training._lint_step import lint_jaxpr, lint_rule
from eqxshard.training.rewrite._jaxprs import all_jaxprs

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
        with pytest.warns(LintWarning, match=r"up float32\[17,9\] is whole on"):
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


def test_an_eval_step_is_linted_once():
    model = make_state().model
    table = np.ones((512, 512), np.float32)

    def metric_fn(model, batch):
        product = batch["x"] @ jnp.asarray(table)[:9]
        return {"value": jax.vmap(model)(batch["x"]).sum(-1) + product[:, 0]}

    step = eqxshard.make_eval_step(metric_fn)
    with pytest.warns(LintWarning, match="eval step of metric_fn, constant: "):
        step(model, BATCH)
    step(model, BATCH)
    with pytest.raises(ValueError, match="constant"):
        eqxshard.make_eval_step(metric_fn, lint="error")(model, BATCH)


def test_a_step_that_lint_cannot_read_runs(monkeypatch):
    def broken(*_):
        raise KeyError("dimension_numbers")

    monkeypatch.setattr("eqxshard.training._lint_step.lint_jaxpr", broken)
    with pytest.warns(RuntimeWarning, match="lint could not read a step"):
        make_step(lint={"whole": "off"})(make_state(), BATCH)


# Rules


def check(rule, make_model: Any, **sizes: Any):
    model = eqx.filter_eval_shape(make_model, KEY)
    return list(lint_rule(named_leaves(model), make_mesh(**sizes), rule))


def odd(key):
    return MLP(key, width=257, size=65)


@pytest.mark.parametrize(
    "rule", [FSDP, eqxshard.combine(eqxshard.by_path({"up": P()}), FSDP)]
)
def test_arrays_that_do_not_divide(rule):
    findings = check(rule, odd, fsdp=8)
    assert [each.leaf for each in findings] == ["up", "down"]
    assert {each.kind for each in findings} == {"whole"}
    assert "no dim of (257, 65) is divisible by fsdp=8" in findings[0].message
    # Everything may be whole on a mesh of another axis, and vectors anywhere.
    assert check(rule, odd, data=8) == []
    assert check(FSDP, lambda key: eqx.nn.LayerNorm(9), fsdp=8) == []


def test_a_rule_that_was_not_checked_when_the_state_was_made():
    mesh = make_mesh(fsdp=8)
    state = eqxshard.abstract_state(MLP, OPTIM, key=KEY, mesh=mesh, rule=FSDP)
    misspelt = eqxshard.first_match(eqxshard.by_path({"upp": P()}), FSDP)
    step = eqxshard.make_train_step(square_losses, OPTIM, rule=misspelt)
    findings = eqxshard.lint(step, state, {"x": np.ones((16, 64), np.float32)})
    found(findings, "unmatched", "'upp' matches no leaf", "did you mean 'up'")


# Arithmetic, callbacks and constants


BFLOAT16 = eqxshard.Precision()


def trace(fn, *args):
    return list(lint_jaxpr([*all_jaxprs(jax.make_jaxpr(fn)(*args))], None))


TABLE = np.ones((512, 512), np.float32)


@pytest.mark.parametrize("table", [TABLE, jnp.asarray(TABLE)], ids=["NumPy", "JAX"])
def test_a_large_constant(table):
    def loss_fn(model, batch, key):
        return square_losses(model, batch, key) + (batch["x"][:, :1] * table).sum(-1)

    finding = found(lint(loss_fn=loss_fn, fsdp=8), "constant", "float32[512,512], 1.05 MB")
    assert "test_lint_step.py:" in str(finding)


def test_a_constant_in_a_branch():
    table = jnp.asarray(TABLE)

    def fn(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x + table, lambda x: 0 * x, x)

    found(trace(fn, jnp.ones((512, 512))), "constant")


def wide_losses(model, batch, key):
    """An array in float32 makes everything after it wide."""
    x = batch["x"] + jnp.ones(64, jnp.float32).astype(jnp.float32) * 2
    return square_losses(model, {"x": x}, key)


def test_products_in_float32_under_bfloat16(as_scripts_run):
    findings = lint(loss_fn=wide_losses, precision=BFLOAT16, fsdp=8)
    finding = found(findings, "dtype", "in a wider type than bfloat16")
    assert "lint_helpers.py:" in str(finding)


def test_products_in_bfloat16_and_a_few_others(as_scripts_run):
    def loss_fn(model, batch, key):
        weights = jax.nn.softmax(batch["x"].astype(jnp.float32) @ jnp.ones((64, 4)))
        return square_losses(model, batch, key) * weights[:, 0]

    assert lint(loss_fn=loss_fn, precision=BFLOAT16, fsdp=8) == ()
    # Wide products of an optimizer are no finding either: they are not in the loss.
    optim = squaring()
    assert lint(optim=optim, precision=BFLOAT16, fsdp=8, nonfinite="ignore") == ()


def squaring():
    """An optimizer of matrix products."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x @ (x.T @ x), updates), state

    return optax.GradientTransformation(lambda params: (), update)


def test_products_in_float64_where_the_model_has_none(as_scripts_run):
    def loss_fn(model, batch, key):
        return square_losses(model, {"x": batch["x"].astype(jnp.float64)}, key)

    with jax.enable_x64(True):
        findings = lint(MLP32, loss_fn, fsdp=8)
        finding = found(findings, "dtype", "float64", "in a wider type than float32")
        assert lint(MLP32, fsdp=8) == ()
    assert "lint_helpers.py:" in str(finding)


class WithScale(eqx.Module):
    """A model whose scale has the default dtype."""

    mlp: MLP
    scale: jax.Array

    def __init__(self, key):
        self.mlp = MLP32(key)
        self.scale = jnp.ones(64)

    def __call__(self, x):
        return self.mlp(x * self.scale)


def test_one_array_in_float64_makes_the_products_of_a_model_wide(as_scripts_run):
    with jax.enable_x64(True):
        findings = lint(WithScale, fsdp=8)
        found(findings, "dtype", "float64", "in a wider type than float32")
        # As in a model that has float64 throughout.
        assert lint(fsdp=8) == ()


class MLP32(MLP):
    """An MLP in float32, whatever the default."""

    def __init__(self, key):
        super().__init__(key)
        self.up, self.down = (x.astype(jnp.float32) for x in (self.up, self.down))


CALLS = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x, vmap_method="expand_dims"),
    "io_callback": lambda x: io_callback(np.sin, x, x),
    "debug.print": lambda x: (jax.debug.print("{}", x), x)[1],
    "debug.callback": lambda x: (jax.debug.callback(print, x), x)[1],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_host(name):
    finding = found(trace(CALLS[name], jnp.ones(8)), "callback", f"{name})", "as metrics")
    assert "test_lint_step.py:" in str(finding)


def in_the_model(model, batch, key):
    check = lambda x: eqx.error_if(x, x[0] < 0, "negative")  # noqa: E731
    return square_losses(model, {"x": jax.vmap(check)(batch["x"])}, key)


def on_each_device(model, batch, key):
    rows = P(("data", "fsdp"))
    check = lambda x: eqx.error_if(x, x[:, 0] < 0, "negative")  # noqa: E731
    spread = jax.shard_map(check, in_specs=rows, out_specs=rows, check_vma=False)
    return square_losses(model, {"x": spread(batch["x"])}, key)


def in_a_condition(model, batch, key):
    goes_on = lambda c: eqx.error_if(c[0] < 3, jnp.any(c[1] < 0), "negative")  # noqa: E731
    start = jnp.int32(0), batch["x"]
    _, x = jax.lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] * 2), start)
    return square_losses(model, {"x": x}, key)


@pytest.mark.parametrize("loss_fn", [in_the_model, on_each_device, in_a_condition])
def test_checks_are_not_calls_of_the_host(loss_fn):
    assert lint(loss_fn=loss_fn, fsdp=8) == ()

    def with_call(model, batch, key):
        x = jax.pure_callback(np.sin, batch["x"][0], batch["x"][0])
        return loss_fn(model, batch, key) + x.sum()

    finding = found(lint(loss_fn=with_call, fsdp=8), "callback", "jax.pure_callback")
    assert "test_lint_step.py:" in str(finding)
