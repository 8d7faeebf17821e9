"""Products of activations with parameters, on factors of eight bits."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import RULES, make_mesh
from step_helpers import KEY

import eqxshard

SGD = optax.sgd(1.0)
FLOAT32 = eqxshard.Precision(None, matmul="float8")
F32, E4M3, E5M2 = np.float32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def make(make_model, loss_fn, mesh="data=1", rule=None, precision=FLOAT32, **options):
    where = {"mesh": make_mesh(mesh), "rule": rule or RULES["replicate"]}
    state = eqxshard.init_state(make_model, SGD, key=KEY, **where, precision=precision)
    return state, eqxshard.make_train_step(loss_fn, SGD, **options)


def rounded(x, dtype):
    """An array as eight bits say it."""
    scale = np.maximum(F32(np.abs(x).max()) / F32(ml_dtypes.finfo(dtype).max), F32(2**-126))
    return (x / scale).astype(dtype).astype(np.float64) * np.float64(scale)


class Factors(eqx.Module):
    """Both factors of a product are parameters, so that a step says both gradients."""

    left: jax.Array
    right: jax.Array
    dims: str = eqx.field(static=True)


def product_loss(model, batch, key):
    # Not a parameter's own any more, but an activation.
    product = jnp.einsum(model.dims, model.left * batch["one"][0, 0], model.right)
    return jnp.sum(product * batch["slope"][0])[None]


@pytest.mark.parametrize(
    "dims, left, right",
    [
        ("bi,oi->bo", (16, 32), (48, 32)),
        pytest.param("bij,jin->nb", (16, 4, 8), (8, 4, 16), marks=pytest.mark.slow),
        pytest.param("xbi,xoi->bxo", (2, 16, 32), (2, 16, 32), marks=pytest.mark.slow),
    ],
)
def test_products_and_gradients_are_those_of_rounded_arrays(dims, left, right):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(F32) for size in (left, right))
    slope = rng.normal(size=np.einsum(dims, x, w).shape).astype(F32)
    state, step = make(lambda key: Factors(jnp.array(x), jnp.array(w), dims), product_loss)
    batch = {"one": np.ones((1, 1), F32), "slope": slope[None]}
    state, metrics = step(state, batch)
    x8, w8, s8 = rounded(x, E4M3), rounded(w, E4M3), rounded(slope, E5M2)
    ins, out = dims.split("->")
    of_left, of_right = ins.split(",")
    for name, old, new, expected in (
        ("left", x, state.model.left, np.einsum(f"{out},{of_right}->{of_left}", s8, w8)),
        ("right", w, state.model.right, np.einsum(f"{out},{of_left}->{of_right}", s8, x8)),
    ):
        np.testing.assert_allclose(old - new, expected, rtol=1e-4, atol=1e-4, err_msg=name)
    loss = np.sum(np.einsum(dims, x8, w8) * slope)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    # Not by chance.
    assert abs(loss - np.sum(np.einsum(dims, x, w) * slope)) > 1e-3 * abs(loss)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1e-42, 1e-30, 1e30])
def test_arrays_of_any_magnitude_are_scaled(size):
    x, w = np.full((16, 16), size, F32), np.eye(16, dtype=F32)
    make_model = lambda key: Factors(jnp.array(x), jnp.array(w), "bi,oi->bo")  # noqa: E731
    state, step = make(make_model, product_loss)
    batch = {"one": np.ones((1, 1), F32), "slope": np.full((1, 16, 16), 1e-30, F32)}
    state, metrics = step(state, batch)
    assert "nonfinite" not in metrics.compute()
    # CPUs flush what is smaller than the smallest normal number.
    np.testing.assert_allclose(metrics["loss"], 256 * F32(size) * 1e-30, 1e-5, atol=1e-37)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(value):
    x = np.ones((16, 16), F32)
    make_model = lambda key: Factors(jnp.array(x), jnp.eye(16), "bi,oi->bo")  # noqa: E731
    state, step = make(make_model, product_loss)
    slope = np.ones((1, 16, 16), F32)
    slope[0, 3, 5] = value
    state, metrics = step(state, {"one": np.ones((1, 1), F32), "slope": slope})
    assert metrics.compute()["nonfinite"] == 1
    np.testing.assert_array_equal(state.model.left, x)


class Zoo(eqx.Module):
    """Parameters in many kinds of products."""

    linear: eqx.nn.Linear
    plain: jax.Array
    turned: jax.Array
    layers: list[eqx.nn.Linear]
    stacked: eqx.nn.Linear
    recurrent: jax.Array
    frozen: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        make = lambda key: eqx.nn.Linear(32, 32, key=key)  # noqa: E731
        self.linear, self.layers = make(keys[0]), [make(keys[1]), make(keys[2])]
        self.stacked = eqx.filter_vmap(make)(jax.random.split(keys[3], 3))
        arrays = jax.random.normal(keys[4], (4, 32, 32)) / 6
        self.plain, self.turned, self.recurrent, self.frozen = arrays

    def __call__(self, x):
        x = jnp.tanh(self.linear(x)) @ self.plain
        for layer in self.layers:
            x = jax.checkpoint(lambda layer, x: jnp.tanh(layer(x)))(layer, x)
        x = eqxshard.scan_layers(self.stacked, x)
        x = jax.lax.scan(lambda x, _: (jnp.tanh(self.recurrent @ x), None), x, length=2)[0]
        x = jax.jit(jnp.dot)(x, self.frozen.T)
        return x @ self.turned.reshape(2, 16, 32).reshape(32, 32).T


def zoo_loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, 64, 32)).astype(F32)))


def count_products(state, step, batch):
    """How many products there are of eight bits and how many of others."""
    found = re.findall(r"dot_general .*: \((.*?)\) ->", step.lower(state, batch).as_text())
    return len(found), sum("f8E" in each for each in found)


def zoo(mesh="data=1", rule="replicate", precision=FLOAT32, accumulate=1):
    where: dict = {"mesh": make_mesh(mesh), "rule": RULES[rule], "precision": precision}
    trained = jax.tree.map(lambda _: True, eqx.filter_eval_shape(Zoo, KEY))
    trained = eqx.tree_at(lambda tree: tree.frozen, trained, False)
    state = eqxshard.init_state(Zoo, SGD, key=KEY, trainable=trained, **where)
    return state, eqxshard.make_train_step(zoo_loss, SGD, accumulate=accumulate)


@pytest.mark.versions
def test_all_products_with_parameters_are_found():
    count, of_eight = count_products(*zoo(), BATCH)
    assert count == of_eight
    some = eqxshard.Precision(None, matmul="float8", matmul_except=("linear", r"layers\.1"))
    of_all, fewer = count_products(*zoo(precision=some), BATCH)
    assert of_all == count and count - fewer >= 5


@pytest.mark.slow
def test_every_mesh_gives_the_same_products():
    found = {}
    for mesh, rule, accumulate in (
        ("data=1", "replicate", 1),
        ("data=2,fsdp=4", "fsdp", 2),
    ):
        state, step = zoo(mesh, rule, accumulate=accumulate)
        losses = []
        for _ in range(2):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        found[mesh] = losses
    one, many = found.values()
    np.testing.assert_allclose(one, many, rtol=1e-3)


class Rematted(eqx.Module):
    """Layers whose backward pass keeps what a policy says."""

    layers: eqx.nn.Linear
    policy: Any = eqx.field(static=True)

    def __init__(self, key, policy):
        make = lambda key: eqx.nn.Linear(32, 32, key=key)  # noqa: E731
        self.layers = eqx.filter_vmap(make)(jax.random.split(key, 3))
        self.policy = policy

    def __call__(self, x):
        if self.policy in ("full", "none", "dots"):
            return eqxshard.scan_layers(self.layers, x, remat=self.policy)
        for i in range(3):
            layer = jax.tree.map(lambda x, i=i: x[i] if eqx.is_array(x) else x, self.layers)
            x = jax.checkpoint(lambda layer, x: layer(x), policy=self.policy)(layer, x)
        return x


@pytest.mark.versions
@pytest.mark.parametrize("mesh, rule", [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_what_is_kept_for_the_backward_pass_stays_as_it_is(mesh, rule):
    """`jax.checkpoint` would make nan of the largest numbers of eight bits."""
    policies = jax.checkpoint_policies
    found = []
    for policy in (
        *("full", "none", "dots"),
        *(policies.nothing_saveable, policies.everything_saveable),
    ):
        make_model = lambda key, policy=policy: Rematted(key, policy)  # noqa: E731
        state, step = make(make_model, zoo_loss, mesh, RULES[rule])
        for _ in range(2):
            state, metrics = step(state, BATCH)
            assert metrics.nonfinite == 0
        found.append(np.asarray(state.model.layers.weight))
    # All layers have the scale of a stack that is no loop's.
    for other, first in zip(found, [found[0]] * 3 + [found[3]] * 2, strict=True):
        np.testing.assert_allclose(other, first, rtol=1e-3, atol=1e-4)


def test_rows_that_do_not_count_are_kept_out_of_scales():
    """All rows share one: nan would be in every metric, and in every prediction."""
    state, _ = zoo()
    counts = np.arange(64) < 50
    x = [np.where(counts[:, None], BATCH["x"], F32(fill)) for fill in (np.nan, 0)]
    nans, zeros = [{"x": each, "__weight__": counts.astype(F32)} for each in x]

    def metric_fn(model, batch):
        return {"out": jax.vmap(model)(batch["x"])}

    eval_step = eqxshard.make_eval_step(metric_fn, precision=FLOAT32)
    found, expected = (eval_step(state.model, x).compute()["out"] for x in (nans, zeros))
    assert np.all(np.isfinite(expected))
    np.testing.assert_array_equal(found, expected)
    found, expected = (
        eqxshard.predict(
            state.model,
            lambda model, batch: metric_fn(model, batch)["out"],
            eqxshard.Loader(
                eqxshard.data.ArraySource(x),
                batch_size=64,
                mesh=make_mesh("data=1"),
                shuffle=False,
            ),
            precision=FLOAT32,
        )
        for x in (nans, zeros)
    )
    np.testing.assert_array_equal(found[counts], expected[counts])


@pytest.mark.slow
def test_rewriting_is_turned_off_for_products_too(monkeypatch):
    monkeypatch.setenv("EQXSHARD_REWRITE", "off")
    assert count_products(*zoo(), BATCH)[1] == 0


def test_a_text_in_place_of_patterns_is_refused():
    with pytest.raises(TypeError, match="matmul_except='linear'"):
        eqxshard.Precision(matmul="float8", matmul_except="linear")


@pytest.mark.slow
def test_a_pattern_without_a_parameter_is_refused():
    precision = eqxshard.Precision(matmul="float8", matmul_except=("liner",))
    state, step = zoo(precision=precision)
    with pytest.raises(ValueError, match="'liner' matches no parameter"):
        step(state, BATCH)
