"""Training by hand in per-device code: parameters gathered, gradients scattered."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives_helpers import MESH, ROWS, normal, one_based_index, per_device, place
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.parallel import collectives

few = settings(deadline=None, max_examples=6)


class Model(eqx.Module):
    """Parameters that are split along either dim, or not; and other leaves."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    scale: jax.Array
    order: jax.Array
    activation: Any

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(8, 16, key=up)
        self.down = eqx.nn.Linear(16, 3, key=down)
        self.scale = jnp.ones(())
        self.order = jnp.arange(8)[::-1]
        self.activation = jnp.tanh

    def __call__(self, x, noise):
        hidden = self.activation(self.up(x[self.order])) + noise
        return self.scale * self.down(hidden)


def loss_of(model, x, y, key):
    """The loss of some rows, with noise that is drawn for them together."""
    noise = jax.random.uniform(key, (x.shape[0], 16))
    return jnp.mean((jax.vmap(model)(x, noise) - y) ** 2)


#: By number of devices: the sizes of data and fsdp.
DEVICES = {1: (1, 1), 2: (1, 2), 4: (4, 1), 8: (2, 4)}


def make_mesh(count):
    data, fsdp = DEVICES[count]
    return eqxshard.make_mesh(data=data, fsdp=fsdp, devices=jax.devices()[:count])


X, Y = normal(32, 8), normal(32, 3, seed=1)
KEY = jax.random.key(5)
RATE = 0.2


def descend(model, grads):
    return eqx.apply_updates(model, jax.tree.map(lambda grad: -RATE * grad, grads))


def explicit_fsdp(specs):
    """A step of one device: gather, differentiate, reduce, update the local part."""

    def step(model, x, y, key):
        params, static = eqx.partition(model, eqx.is_inexact_array)
        key = collectives.fold_in_axes(key, ROWS)

        def loss(params):
            whole = collectives.gather_params(eqx.combine(params, static), specs, ROWS)
            return loss_of(whole, x, y, key)

        value, grads = jax.value_and_grad(loss)(params)
        grads = collectives.sync_gradients(grads, specs, ROWS)
        return descend(model, grads), jax.lax.pmean(value, ROWS)

    return step


@ft.cache
def descent_on_one_device(count):
    """The models and losses of 20 steps of one device that takes the part of all."""

    @eqx.filter_jit
    def step(model, key):
        def loss(model):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
            x, y = X.reshape(count, -1, 8), Y.reshape(count, -1, 3)
            return jnp.mean(jax.vmap(loss_of, (None, 0, 0, 0))(model, x, y, keys))

        value, grads = eqx.filter_value_and_grad(loss)(model)
        return descend(model, grads), value

    steps = []
    model = Model(jax.random.key(0))
    for i in range(20):
        model, value = step(model, jax.random.fold_in(KEY, i))
        steps.append((model, value))
    return steps


@pytest.mark.versions
@pytest.mark.parametrize(
    "count, check_vma",
    [
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2, 4)),
        *((8, True), (8, False)),
    ],
)
def test_explicit_fsdp_equals_gradient_descent_on_one_device(count, check_vma):
    mesh = make_mesh(count)
    model, specs = place(Model(jax.random.key(0)), mesh, min_size=8)
    if count in (2, 8):
        assert specs.up.weight == specs.order == P("fsdp")
        assert specs.down.weight == P(None, "fsdp")
        assert specs.down.bias == specs.scale == P()
    step = per_device(
        explicit_fsdp(specs),
        (specs, P(ROWS), P(ROWS), P()),
        (specs, P()),
        mesh,
        check_vma=check_vma,
    )
    for i, (expected, expected_value) in enumerate(descent_on_one_device(count)):
        model, value = step(model, X, Y, jax.random.fold_in(KEY, i))
        np.testing.assert_allclose(value, expected_value, rtol=1e-6)
        assert_close(model, expected, rtol=1e-6, atol=1e-6)
    assert model.up.weight.addressable_shards[0].data.shape == (16 // DEVICES[count][1], 8)


@few
@given(entries=st.permutations(["data", "fsdp", None]), joint=st.booleans())
def test_any_specs_can_be_gathered(entries, joint):
    x = normal(8, 16, 24)
    spec = P(None, tuple(axis for axis in entries if axis)) if joint else P(*entries)

    def fn(part):
        return collectives.gather_params({"x": part}, spec, ROWS)["x"][None]

    for copy in per_device(fn, spec, P(ROWS))(x):
        np.testing.assert_array_equal(copy, x)


def test_dims_split_over_other_axes_stay_split():
    mesh = eqxshard.make_mesh(fsdp=4, tensor=2)
    x = normal(16, 8)
    specs = {"a": P("tensor", "fsdp"), "b": P(("tensor", "fsdp")), "c": P("tensor")}
    rows = P("tensor")

    def fn(params):
        whole = collectives.gather_params(params, specs, ROWS)
        grads = jax.grad(
            lambda params: sum(
                jnp.sum(leaf**2) * one_based_index("fsdp")
                for leaf in collectives.gather_params(params, specs, ROWS).values()
            )
        )(params)
        return whole, collectives.sync_gradients(grads, specs, ROWS)

    mapped = per_device(fn, (specs,), (rows, specs), mesh, check_vma=False)
    whole, grads = mapped(dict.fromkeys("abc", x))
    for name in "abc":
        np.testing.assert_array_equal(whole[name], x)
        np.testing.assert_allclose(grads[name], 2 * x * 2.5, rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_ungathered_params_are_averaged_too(check_vma):
    """Plain data parallelism: nothing is gathered, so sync_gradients takes all means."""
    model = Model(jax.random.key(0))

    def fn(model, x, y):
        grads = eqx.filter_grad(loss_of)(model, x, y, KEY)
        return collectives.sync_gradients(grads, P(), ROWS)

    def expected(model):
        x, y = X.reshape(8, -1, 8), Y.reshape(8, -1, 3)
        return jnp.mean(jax.vmap(loss_of, (None, 0, 0, None))(model, x, y, KEY))

    grads = per_device(fn, (P(), P(ROWS), P(ROWS)), P(), check_vma=check_vma)(model, X, Y)
    assert_close(grads, eqx.filter_jit(eqx.filter_grad(expected))(model))


def test_gradients_are_scattered_over_fsdp_before_they_are_summed_over_data():
    """Only a quarter of the weight crosses data, the slow axis."""
    specs = {"w": P("fsdp")}

    def fn(params, x):
        def loss(params):
            w = collectives.gather_params(params, specs, ROWS)["w"]
            return jnp.sum((x @ w) ** 2) + jnp.sum(x @ w)

        return collectives.sync_gradients(jax.grad(loss)(params), specs, ROWS)

    for check_vma in (True, False):
        mapped = eqxshard.filter_shard_map(
            fn, MESH, (specs, P(ROWS)), specs, check_vma=check_vma
        )
        text = str(jax.make_jaxpr(mapped)({"w": normal(8, 8)}, normal(16, 8)))
        sums = [line for line in text.splitlines() if " psum" in line]
        assert ["f32[2,8]" in line for line in sums] == [True], text
