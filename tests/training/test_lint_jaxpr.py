"""Steps whose arithmetic, callbacks or constants are most likely not meant."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from lint_helpers import MLP, found, lint, square_losses

import eqxshard
from eqxshard.training._lint_jaxpr import lint_jaxpr

BFLOAT16 = eqxshard.Precision()


def trace(fn, *args, compute=None, wide=()):
    return list(lint_jaxpr(jax.make_jaxpr(fn)(*args), compute, wide, True))


TABLE = np.ones((512, 512), np.float32)


@pytest.mark.parametrize("table", [TABLE, jnp.asarray(TABLE)], ids=["NumPy", "JAX"])
def test_a_large_constant(table):
    def loss_fn(model, batch, key):
        return square_losses(model, batch, key) + (batch["x"][:, :1] * table).sum(-1)

    finding = found(lint(loss_fn=loss_fn, fsdp=8), "constant", "float32[512,512], 1.05 MB")
    assert "test_lint_jaxpr.py:" in str(finding)


def test_a_constant_in_a_branch():
    table = jnp.asarray(TABLE)

    def fn(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x + table, lambda x: 0 * x, x)

    found(trace(fn, jnp.ones((512, 512))), "constant")


def test_small_constants_and_made_up_ones_are_none():
    small = np.ones((100, 100), np.float32)

    def fn(x):
        return small.sum() + jnp.tri(2000).sum() + x.sum()

    assert trace(fn, jnp.ones(3)) == []


def wide_losses(model, batch, key):
    """An array in float32 makes everything after it wide."""
    x = batch["x"] + jnp.ones(64, jnp.float32).astype(jnp.float32) * 2
    return square_losses(model, {"x": x}, key)


def test_products_in_float32_under_bfloat16(as_scripts_run):
    findings = lint(loss_fn=wide_losses, precision=BFLOAT16, fsdp=8)
    finding = found(findings, "dtype", "in float32, under", "compute=bfloat16")
    assert "lint_helpers.py:" in str(finding)


def test_products_in_bfloat16_and_a_few_others(as_scripts_run):
    def loss_fn(model, batch, key):
        weights = jax.nn.softmax(batch["x"].astype(jnp.float32) @ jnp.ones((64, 4)))
        return square_losses(model, batch, key) * weights[:, 0]

    assert lint(loss_fn=loss_fn, precision=BFLOAT16, fsdp=8) == ()
    # Nor are those of an optimizer, which are not of the loss.
    optim = squaring()
    assert lint(optim=optim, precision=BFLOAT16, fsdp=8, nonfinite="ignore") == ()


def squaring():
    """An optimizer of matrix products."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x @ (x.T @ x), updates), state

    return optax.GradientTransformation(lambda params: (), update)


def test_float64_that_no_array_of_the_model_has():
    def fn(x):
        return jnp.sum(jnp.sin(x.astype(jnp.float64)))

    with jax.enable_x64(True):
        found(trace(fn, jnp.ones((128, 128), jnp.float32)), "dtype", "float64[128,128]")
        # Numbers cost nothing.
        assert trace(fn, jnp.float32(3)) == []
        x = jnp.ones((128, 128), jnp.float32)
        found(trace(fn, x, wide=["head.bias"]), "dtype", "head.bias is float64")
        # All of the model is.
        assert list(lint_jaxpr(jax.make_jaxpr(fn)(x), None, ["weight"], False)) == []


CALLS = {
    "pure_callback": lambda x: jax.pure_callback(np.sin, x, x, vmap_method="expand_dims"),
    "io_callback": lambda x: io_callback(np.sin, x, x),
    "debug.print": lambda x: (jax.debug.print("{}", x), x)[1],
    "debug.callback": lambda x: (jax.debug.callback(print, x), x)[1],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_the_host(name):
    finding = found(trace(CALLS[name], jnp.ones(8)), "callback", f"{name})", "as metrics")
    assert "test_lint_jaxpr.py:" in str(finding)


def test_checks_are_not_calls_of_the_host():
    class Checked(MLP):
        def __call__(self, x):
            return super().__call__(eqx.error_if(x, x[0] < 0, "negative"))

    assert lint(Checked, fsdp=8) == ()
