"""Convolutions on CPUs: the same numbers, in the form that XLA has a fast kernel for."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_mesh

import eqxshard

OPTIM = lenient(optax.sgd(0.1))
KEY = jax.random.key(0)
CONVOLUTION = re.compile(r"convolution\([^\n]*dim_labels=(\w+->\w+)")


class ConvNet(eqx.Module):
    """Convolutions of every kind that has gradients of its own."""

    plain: eqx.nn.Conv2d
    strided: eqx.nn.Conv2d
    grouped: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    line: eqx.nn.Conv1d
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.plain = eqx.nn.Conv2d(1, 4, 3, padding=1, key=keys[0])
        self.strided = eqx.nn.Conv2d(4, 6, 3, stride=2, dilation=2, key=keys[1])
        self.grouped = eqx.nn.Conv2d(6, 6, 2, groups=3, key=keys[2])
        self.up = eqx.nn.ConvTranspose2d(6, 2, 3, stride=2, key=keys[3])
        self.line = eqx.nn.Conv1d(2, 3, 5, key=keys[4])
        self.out = eqx.nn.Linear(3, 2, key=keys[5])

    def __call__(self, x):
        x = jax.nn.relu(self.strided(jax.nn.relu(self.plain(x))))
        x = self.up(jax.nn.relu(self.grouped(x)))
        x = self.line(x.reshape(2, -1))
        return self.out(jnp.mean(x, axis=-1))


def losses(model, batch, key):
    return jnp.sum((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def make(mesh="data=2", **options):
    where: dict[str, Any] = {"mesh": make_mesh(mesh), "rule": eqxshard.replicate()}
    state = eqxshard.init_state(ConvNet, OPTIM, key=KEY, **where)
    return state, eqxshard.make_train_step(losses, OPTIM, **where, **options)


def batch(rows=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 1, 12, 12)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(rows, 2)).astype(np.float32)}


@functools.cache
def by_hand(steps):
    """Parameters after some steps, by JAX alone, in whatever order it has the dims."""
    params, static = eqx.partition(ConvNet(KEY), eqx.is_inexact_array)
    mean = lambda params: jnp.mean(losses(eqx.combine(params, static), batch(), KEY))  # noqa: E731
    gradient = jax.jit(jax.grad(mean))
    for _ in range(steps):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params))
    return eqx.combine(params, static)


def assert_model_close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mesh", ["data=1", "data=2", "data=2,fsdp=2"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_steps_are_those_of_jax(mesh, options):
    state, train_step = make(mesh, **options)
    for _ in range(2):
        state, _ = train_step(state, batch())
    assert_model_close(eqx.filter(state.model, eqx.is_array), by_hand(2))


def test_stacked_steps_are_those_of_jax():
    state, train_step = make()
    stacked = jax.tree.map(lambda x: np.stack([x, x]), batch())
    state, _ = train_step.many(state, stacked)
    assert_model_close(eqx.filter(state.model, eqx.is_array), by_hand(2))


def test_loops_have_convolutions_only_as_xla_has_a_kernel_for():
    """Any other takes ten times as long there: XLA reorders dims outside of loops only."""
    state, train_step = make(accumulate=2)
    text = train_step.lower(state, batch()).as_text("hlo")
    assert set(CONVOLUTION.findall(str(text))) == {"b01f_01io->b01f", "b0f_0io->b0f"}


def test_no_convolution_is_left_to_ynnpack():
    """It takes five times as long as XLA's own kernel for the gradient of a weight."""
    state, train_step = make()
    compiled = train_step.lower(state, batch()).compile()
    kinds = re.findall(r"ynn_fusion[^\n]*op_name=\"([^\"]*)\"", str(compiled.as_text()))
    assert not [name for name in kinds if "conv_general_dilated" in name]


def test_an_evaluation_is_that_of_jax():
    where: dict[str, Any] = {"mesh": make_mesh("data=2"), "rule": eqxshard.replicate()}
    eval_step = eqxshard.make_eval_step(
        lambda model, batch: {"loss": losses(model, batch, None)}, **where
    )
    state, _ = make()
    expected = jnp.mean(losses(ConvNet(KEY), batch(), None))
    measured = eval_step(state.model, batch()).compute()["loss"]
    assert measured == pytest.approx(float(expected), rel=1e-5)


def test_convolutions_in_conditions_loops_and_checkpoints_are_found():
    def loss_fn(model, batch, key):
        def both(x):
            plain, other = lambda x: model.plain(x), lambda x: -model.plain(x)
            return jnp.mean(jax.lax.cond(x[0, 0, 0] > 0, plain, other, x))

        return jax.checkpoint(jax.vmap(both))(batch["x"])

    where: dict[str, Any] = {"mesh": make_mesh("data=1"), "rule": eqxshard.replicate()}
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
    state = eqxshard.init_state(ConvNet, OPTIM, key=KEY, **where)
    text = train_step.lower(state, batch()).as_text("hlo")
    assert set(CONVOLUTION.findall(str(text))) == {"b01f_01io->b01f"}
    _, metrics = train_step(state, batch())
    expected = jnp.mean(loss_fn(ConvNet(KEY), batch(), None))
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_per_device_code_with_a_convolution_runs():
    mesh = make_mesh("data=2")

    def loss_fn(model, batch, key):
        def local(weight, x):
            return jax.lax.conv(x, weight, (1, 1), "SAME").mean(axis=(1, 2, 3))

        rows = jax.P(("data", "fsdp"))
        spread = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), rows), out_specs=rows)
        return spread(model.plain.weight, batch["x"])

    where: dict[str, Any] = {"mesh": mesh, "rule": eqxshard.replicate()}
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, **where)
    state = eqxshard.init_state(ConvNet, OPTIM, key=KEY, **where)
    weight = ConvNet(KEY).plain.weight
    expected = jnp.mean(jax.lax.conv(jnp.asarray(batch()["x"]), weight, (1, 1), "SAME"))
    _, metrics = train_step(state, batch())
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
