"""Layers gathered one at a time, and run by one scan."""

import functools as ft
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import lenient, needs_new_jax
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.testing import collectives

KEY = jax.random.key(0)
WIDTH, DEPTH = 32, 6
OPTIM = lenient(optax.adam(1e-2))


class Layer(eqx.Module):
    up: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    count: jax.Array

    def __init__(self, key):
        self.up = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.dropout = eqx.nn.Dropout(0.2)
        self.count = jnp.arange(3)

    def __call__(self, x, shift=None, *, key=None):
        x = x if shift is None else x + shift
        return x + self.dropout(jax.nn.gelu(self.up(x)), key=key, inference=key is None)


def stacked(key=KEY):
    return eqx.filter_vmap(Layer)(jax.random.split(key, DEPTH))


def one_by_one(layers, x, *args, key=None):
    """The reference: a Python loop over the layers."""
    keys = [None] * DEPTH if key is None else jax.random.split(key, DEPTH)
    arrays, static = eqx.partition(layers, eqx.is_array)
    for i in range(DEPTH):
        layer = eqx.combine(jax.tree.map(lambda leaf, i=i: leaf[i], arrays), static)
        x = layer(x, *args, key=keys[i])
    return x


REMATS = ["none", "dots", "full", "offload", jax.checkpoint_policies.dots_saveable]


@pytest.mark.versions
@pytest.mark.parametrize("remat", graded(REMATS, ["none", "full"], REMATS))
def test_it_is_a_loop_over_the_layers(remat):
    x, key = jax.random.normal(KEY, (WIDTH,)), jax.random.key(1)
    layers = stacked()

    @eqx.filter_value_and_grad
    def ours(layers):
        return jnp.sum(eqxshard.scan_layers(layers, x, x, key=key, remat=remat) ** 2)

    @eqx.filter_value_and_grad
    def reference(layers):
        return jnp.sum(one_by_one(layers, x, x, key=key) ** 2)

    for found, expected in zip(
        jax.tree.leaves(eqx.filter_jit(ours)(layers)), jax.tree.leaves(reference(layers))
    ):
        np.testing.assert_allclose(found, expected, 0, 1e-5 * np.abs(expected).max())
    without = eqxshard.scan_layers(layers, x)
    np.testing.assert_allclose(without, one_by_one(layers, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "layers", [Layer(KEY), eqx.tree_at(lambda s: s.count, stacked(), jnp.zeros(3))]
)
def test_layers_that_are_not_stacked_are_refused(layers):
    with pytest.raises(TypeError, match=r"are a list, .* called; stack them in one module"):
        eqxshard.scan_layers([layers], jnp.ones(8))
    with pytest.raises(ValueError, match="without a common leading dim; stack the layers"):
        eqxshard.scan_layers(layers, jnp.zeros(WIDTH))


class Deep(eqx.Module):
    layers: Layer
    call: Any = eqx.field(static=True)

    def __call__(self, x, key=None):
        return self.call(self.layers, x, key=key)


def losses(model, batch, key):
    keys = jax.random.split(key, batch["x"].shape[0])
    return jnp.mean(jax.vmap(model)(batch["x"], keys) ** 2, axis=-1)


def by_filter_vmap(model, batch, key):
    keys = jax.random.split(key, batch["x"].shape[0])
    return jnp.mean(eqx.filter_vmap(model)(batch["x"], keys) ** 2, axis=-1)


def plain_scan(layers, x, *, key):
    arrays, static = eqx.partition(layers, eqx.is_array)

    def body(x, layer):
        arrays, key = layer
        return eqx.combine(arrays, static)(x, key=key), None

    return jax.lax.scan(body, x, (arrays, jax.random.split(key, DEPTH)))[0]


def make(call, loss_fn=losses, sizes: Any = None, **options):
    sizes = {"data": 1, "fsdp": 8} if sizes is None else sizes
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    mesh = eqxshard.make_mesh(**sizes, devices=devices)
    # Not over the layers' own dim.
    rule = eqxshard.by_path({r"up\.": P(None, "fsdp")})
    placed: dict = dict(mesh=mesh, rule=eqxshard.first_match(rule, eqxshard.replicate()))
    init = {k: v for k, v in options.items() if k == "precision"}
    state = eqxshard.init_state(
        lambda key: Deep(stacked(key), call), OPTIM, key=KEY, **placed, **init
    )
    return state, eqxshard.make_train_step(loss_fn, OPTIM, **placed, **options)


BATCH = {"x": np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)}


def run(state, train_step, steps=3):
    found = []
    for _ in range(steps):
        state, metrics = train_step(state, BATCH)
        found.append(metrics.compute()["loss"])
    return found, state


def gathers(train_step, state):
    found = collectives(train_step, state, BATCH)
    return [shape for op in found if op.kind == "all-gather" for shape in op.shapes]


@pytest.mark.versions
@pytest.mark.parametrize(
    "loss_fn", graded([losses, by_filter_vmap], [losses], [by_filter_vmap])
)
def test_under_fsdp_one_layer_at_a_time_is_gathered(loss_fn):
    state, train_step = make(eqxshard.scan_layers, loss_fn)
    found = gathers(train_step, state)
    # A weight and a bias, forward and again backward; never all layers of one.
    assert len(found) == 4
    assert all(shape.startswith((f"f32[1,{WIDTH}", f"f32[{WIDTH}")) for shape in found)
    whole, plain_step = make(plain_scan, loss_fn)
    assert all(shape.startswith(f"f32[{DEPTH}") for shape in gathers(plain_step, whole))
    memory: Any = [
        step.lower(s, BATCH).compile().memory_analysis()
        for step, s in ((train_step, state), (plain_step, whole))
    ]
    ours, theirs = (each.temp_size_in_bytes for each in memory)
    assert ours < theirs - (DEPTH - 2) * 4 * WIDTH * (WIDTH + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, options",
    [
        ("full", {}),
        ("full", {"accumulate": 2}),
        pytest.param("offload", {}, marks=needs_new_jax),
    ],
)
def test_it_trains_as_one_device_does(remat, options):
    one, state_one = run(*make(plain_scan, sizes={"data": 1}, **options))
    call = ft.partial(eqxshard.scan_layers, remat=remat)
    found, state = run(*make(call, **options))
    np.testing.assert_allclose(found, one, rtol=1e-5)
    for new, expected in zip(
        jax.tree.leaves(state.model.layers.up), jax.tree.leaves(state_one.model.layers.up)
    ):
        assert new.sharding.spec == P(None, "fsdp")
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-6)


def both(fn):
    return eqx.filter_checkpoint(eqx.filter_jit(fn))


HALF = eqxshard.Precision(jnp.bfloat16)
WRAPS = [eqx.filter_jit, eqx.filter_checkpoint, both]


@pytest.mark.parametrize("precision", graded([None, HALF], [None], [HALF]))
@pytest.mark.parametrize("wrap", graded(WRAPS, [both], WRAPS))
def test_layers_that_another_transform_passed_on_are_gathered_one_at_a_time(
    wrap, precision
):
    def call(layers, x, *, key):
        scan = wrap(lambda layers, x, key: eqxshard.scan_layers(layers, x, key=key))
        return scan(layers, x, key)

    state, train_step = make(call, precision=precision)
    text = train_step.lower(state, BATCH).compile().as_text() or ""
    gathers = [line for line in text.splitlines() if "all-gather(" in line]
    assert gathers and not any(f"[{DEPTH},{WIDTH},{WIDTH}]" in line for line in gathers)
    found, state = run(state, train_step)
    plain, state_plain = run(*make(eqxshard.scan_layers, precision=precision))
    np.testing.assert_allclose(found, plain, rtol=1e-6 if precision is None else 1e-2)
    for new, expected in zip(*map(jax.tree.leaves, (state.model, state_plain.model))):
        if eqx.is_array(new):
            np.testing.assert_allclose(new, expected, rtol=1e-2, atol=1e-3)


def own_scan(layers, x, *, key):
    """A loop of the user's own, each layer in `jax.checkpoint`."""
    arrays, static = eqx.partition(layers, eqx.is_array)
    body = lambda x, layer: (eqx.combine(layer, static)(x), None)  # noqa: E731
    return jax.lax.scan(jax.checkpoint(body), x, arrays)[0]


def under_cond(layers, x, *, key):
    call = lambda x: own_scan(layers, x, key=key)  # noqa: E731
    return jax.lax.cond(jnp.sum(x) < jnp.inf, call, lambda x: x, x)


def own_derivative(layers, x, *, key):
    """A function whose derivative is twice the right one."""
    arrays, static = eqx.partition(layers.up, eqx.is_array)

    def plain(arrays, x):
        body = lambda x, up: (jnp.tanh(eqx.combine(up, static)(x)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(body), x, arrays)[0]

    apply = jax.custom_vjp(plain)
    double = lambda vjp, g: jax.tree.map(lambda leaf: 2 * leaf, vjp(g))  # noqa: E731
    apply.defvjp(lambda arrays, x: jax.vjp(plain, arrays, x), double)
    return apply(arrays, x)


def test_a_loop_of_the_users_own_gathers_one_layer_at_a_time():
    found = gathers(*make(own_scan)[::-1])
    assert found and not any(shape.startswith(f"f32[{DEPTH}") for shape in found)


@pytest.mark.parametrize(
    "call",
    graded(
        [own_scan, under_cond, own_derivative], [own_derivative], [own_scan, under_cond]
    ),
)
def test_loops_of_the_users_own_learn_as_on_one_device(call):
    one, state_one = run(*make(call, sizes={"data": 1}), steps=2)
    found, state = run(*make(call, lint="off"), steps=2)
    np.testing.assert_allclose(found, one, rtol=1e-5)
    for new, expected in zip(*map(jax.tree.leaves, (state.model, state_one.model))):
        if eqx.is_array(new):
            np.testing.assert_allclose(new, expected, rtol=1e-3, atol=1e-5)


def forward(call, arrays, static, x):
    """The values and their derivative along the parameters, by forward mode."""
    out, tangent = jax.jvp(lambda a: call(eqx.combine(a, static), x), (arrays,), (arrays,))
    return out + tangent


def per_device(call, arrays, static, x):
    rows = P("fsdp")
    fn = eqxshard.filter_shard_map(
        lambda a, x: call(eqx.combine(a, static), x), None, (P(), rows), rows
    )
    return fn(arrays, x)


@pytest.mark.parametrize(
    "transform", graded([forward, per_device], [per_device], [forward])
)
def test_layers_go_through_transforms_that_gather_nothing(transform):
    """The values are those of one device, under transforms of JAX and per-device code."""

    def call(layers, x, *, key):
        del key
        arrays, static = eqx.partition(eqx.nn.inference_mode(layers), eqx.is_inexact_array)

        def apply(layers, x):
            return jax.vmap(lambda x: eqxshard.scan_layers(layers, x))(x)

        if transform is per_device and jax.sharding.get_abstract_mesh().size == 1:
            return apply(eqx.combine(arrays, static), x)
        return transform(apply, arrays, static, x)

    def whole(model, batch, key):
        return jnp.mean(call(model.layers, batch["x"], key=key) ** 2, axis=-1)

    # Per-device code that takes whole layers gathers all of them at once.
    found, _ = run(*make(eqxshard.scan_layers, whole, lint="off"), steps=1)
    one, _ = run(*make(eqxshard.scan_layers, whole, sizes={"data": 1}), steps=1)
    np.testing.assert_allclose(found, one, rtol=1e-5)


def test_a_layer_is_cast_before_it_is_gathered():
    seen = []

    def loss_fn(model, batch, key):
        out = losses(model, batch, key)
        seen.append((batch["x"].dtype, out.dtype))
        return out

    precision = eqxshard.Precision(jnp.bfloat16)
    state, train_step = make(eqxshard.scan_layers, loss_fn, precision=precision)
    lowered = train_step.lower(state, BATCH).as_text()
    assert {(a.name, b.name) for a, b in seen} == {("bfloat16", "bfloat16")}
    # The constraints that gather a layer are on bfloat16; gradients return as float32.
    constrained = re.findall(r"sharding_constraint .*?tensor<(\w+)>", lowered)
    assert f"{WIDTH}x{WIDTH}xbf16" in constrained
    _, state = run(state, train_step)
    assert state.model.layers.up.weight.dtype == jnp.float32
