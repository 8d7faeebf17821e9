import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.parallel import collectives

ROWS = ("data", "fsdp")
MESH = eqxshard.make_mesh(data=2, fsdp=4)


def per_device(
    fn: Any, in_specs: Any, out_specs: Any, mesh: Any = MESH, **kwargs: Any
) -> Any:
    mapped = eqxshard.filter_shard_map(fn, mesh, in_specs, out_specs, **kwargs)
    return eqxshard.filter_jit(mapped)


def place(tree, mesh, min_size=1):
    """A PyTree placed by fsdp(), and its specs."""
    shardings = eqxshard.shardings(tree, mesh, eqxshard.fsdp(min_size=min_size))
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return eqxshard.filter_shard(tree, shardings), specs


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@st.composite
def arrays_and_dims(draw):
    """An array of one to three dims, and a dim of it that divides by 8."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= 8
    return normal(*shape), dim


def one_based_index(axis):
    return (1 + jax.lax.axis_index(axis)).astype(jnp.float32)


few = settings(deadline=None, max_examples=6)


# All-gather and reduce-scatter


@few
@given(
    case=arrays_and_dims(),
    axis=st.sampled_from(["data", "fsdp", ROWS, ROWS[::-1]]),
    from_the_end=st.booleans(),
)
def test_gathering_and_scattering_are_inverse(case, axis, from_the_end):
    whole, dim = case
    split = P(*[None] * dim, axis)

    def fn(part):
        at = dim - whole.ndim if from_the_end else dim
        gathered = collectives.all_gather_mean_grad(part, axis, at)
        parts = collectives.pmean_scatter(gathered, axis, at)
        return gathered[None], parts

    stacked, parts = per_device(fn, split, (P(axis), split))(whole)
    for gathered in stacked:
        np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


@few
@given(case=arrays_and_dims(), axis=st.sampled_from(["data", "fsdp", ROWS, ROWS[::-1]]))
def test_scattered_sums_and_means(case, axis):
    whole, dim = case
    size = MESH.shape.get(axis, 8)
    stacked = np.stack([(i + 1) * whole for i in range(size)])

    def fn(x):
        scatter = ft.partial(collectives.psum_scatter, x[0], axis, dim)
        return scatter(), collectives.pmean_scatter(x[0], axis, dim)

    split = P(*[None] * dim, axis)
    total, mean = per_device(fn, P(axis), split)(stacked)
    np.testing.assert_allclose(total, stacked.sum(0), rtol=1e-5)
    np.testing.assert_allclose(mean, stacked.mean(0), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["fsdp", ROWS])
def test_the_gradient_of_gathering_is_the_mean(axis, check_vma):
    whole, weights = normal(3, 8), normal(8, 3, 8, seed=1)
    size = 4 if axis == "fsdp" else 8

    def fn(part, weight):
        def loss(part):
            return jnp.sum(weight[0] * collectives.all_gather_mean_grad(part, axis, 1) ** 2)

        return jax.grad(loss)(part)

    grads = per_device(fn, (P(None, axis), P(axis)), P(None, axis), check_vma=check_vma)
    expected = 2 * whole * weights[:size].mean(0)
    assert_close(grads(whole, weights[:size]), expected)


def test_integers_and_bfloat16_are_gathered_too():
    def fn(tree):
        gather = ft.partial(collectives.all_gather_mean_grad, axis="fsdp")

        def loss(weight):
            index = gather(tree["index"])
            return jnp.sum(gather(weight)[index].astype(jnp.float32))

        return jax.tree.map(gather, tree), jax.grad(loss)(tree["weight"])

    tree = {"index": np.arange(8)[::-1], "weight": jnp.arange(8, dtype=jnp.bfloat16)}
    mapped = per_device(fn, P("fsdp"), (P(), P("fsdp")), check_vma=False)
    gathered, grad = mapped(tree)
    assert_equal(gathered, tree)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad.astype(np.float32), np.ones(8))


# Shifts


@few
@given(by=st.integers(-9, 9), axis=st.sampled_from(["data", "fsdp"]), wrap=st.booleans())
def test_a_shift_is_a_roll_over_devices(by, axis, wrap):
    size = MESH.shape[axis]
    x = {"a": 1 + np.arange(2 * size, dtype=np.float32), "b": [normal(size, 3)]}
    out = per_device(lambda x: collectives.shift(x, axis, by, wrap=wrap), P(axis), P(axis))(
        x
    )

    def expected(leaf):
        blocks = leaf.reshape(size, -1)
        moved = np.roll(blocks, by, axis=0)
        sender = np.arange(size) - by
        missing = (sender < 0) | (sender >= size)
        return np.where(missing[:, None] & (not wrap), 0, moved).reshape(leaf.shape)

    assert_equal(out, jax.tree.map(expected, x))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", [True, False])
def test_the_gradient_of_a_shift_is_shifted_back(wrap, check_vma):
    weights = normal(4)

    def fn(x, weight):
        def loss(x):
            return jnp.sum(weight * collectives.shift(x, "fsdp", wrap=wrap))

        return jax.grad(loss)(x)

    grads = per_device(fn, P("fsdp"), P("fsdp"), check_vma=check_vma)(normal(4), weights)
    expected = np.roll(weights, -1)
    expected[-1] *= wrap
    np.testing.assert_array_equal(grads, expected)


def test_shift_defaults_to_the_next_device_in_a_ring():
    out = per_device(lambda x: collectives.shift(x, "fsdp"), P("fsdp"), P("fsdp"))
    np.testing.assert_array_equal(out(np.arange(4)), [3, 0, 1, 2])


# Keys


def key_data(key):
    return (
        jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    )


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_differ_along_the_given_axes_only(make_key):
    keys = {}
    for axes in ("data", "fsdp", ROWS):
        mapped = per_device(
            lambda key, axes=axes: key_data(collectives.fold_in_axes(key, axes))[None],
            P(),
            P(ROWS),
            check_vma=False,
        )
        keys[axes] = np.asarray(mapped(make_key(3))).reshape(2, 4, 2)
    assert len({tuple(key) for key in keys[ROWS].reshape(8, 2).tolist()}) == 8
    assert len({tuple(key) for key in keys["fsdp"].reshape(8, 2).tolist()}) == 4
    np.testing.assert_array_equal(keys["fsdp"][0], keys["fsdp"][1])
    assert len({tuple(key) for key in keys["data"].reshape(8, 2).tolist()}) == 2
    np.testing.assert_array_equal(keys["data"][:, 0], keys["data"][:, 3])
    expected = [key_data(jax.random.fold_in(make_key(3), i)) for i in range(8)]
    np.testing.assert_array_equal(keys[ROWS].reshape(8, 2), expected)


# Parameters


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


@pytest.mark.parametrize(
    "count, check_vma", [(1, True), (2, True), (4, True), (8, True), (8, False)]
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


def test_shard_params_matches_placement_on_the_mesh():
    model, specs = place(Model(jax.random.key(0)), MESH)

    def shard(key):
        return collectives.shard_params(Model(key), specs)

    def gather(model):
        return collectives.gather_params(model, specs, ROWS)

    sharded = per_device(shard, P(), specs)(jax.random.key(0))
    assert_equal(sharded, model)
    for ours, theirs in zip(*map(jax.tree.leaves, (sharded, model))):
        if eqx.is_array(ours):
            assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    whole = per_device(gather, (specs,), P(), check_vma=False)(sharded)
    assert_equal(whole, model)
    assert whole.activation is jnp.tanh


@few
@given(entries=st.permutations(["data", "fsdp", None]), joint=st.booleans())
def test_any_specs_can_be_sharded_and_gathered(entries, joint):
    x = normal(8, 16, 24)
    spec = P(None, tuple(axis for axis in entries if axis)) if joint else P(*entries)

    def fn(x):
        part = collectives.shard_params({"x": x}, {"x": spec})
        gathered = collectives.gather_params(part, spec, ROWS)
        return part["x"], gathered["x"][None]

    part, gathered = per_device(fn, P(), (spec, P(ROWS)))(x)
    np.testing.assert_array_equal(part, x)
    for copy in gathered:
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


def test_sync_gradients_averages_over_the_given_axes_that_a_spec_does_not_name():

    def fn(x):
        x = x * one_based_index(ROWS)
        return collectives.sync_gradients(
            {"a": x, "b": x, "c": None}, {"a": P(), "b": P("fsdp"), "c": None}, ROWS
        ), collectives.sync_gradients(x, P(), "data")

    out_specs = ({"a": P(), "b": P("fsdp"), "c": None}, P("fsdp"))
    out, along_data = per_device(fn, P(), out_specs)(np.ones(1, np.float32))
    np.testing.assert_array_equal(out["a"], [4.5])
    np.testing.assert_array_equal(out["b"], [3, 4, 5, 6])
    np.testing.assert_array_equal(along_data, [3, 4, 5, 6])


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


# Mistakes


CALLS = {
    "all_gather_mean_grad": lambda x, axis: collectives.all_gather_mean_grad(x, axis),
    "psum_scatter": lambda x, axis: collectives.psum_scatter(x, axis),
    "shift": lambda x, axis: collectives.shift(x, axis),
    "fold_in_axes": lambda x, axis: collectives.fold_in_axes(KEY, axis),
    "shard_params of params.x": lambda x, axis: collectives.shard_params({"x": x}, P(axis)),
    "gather_params": lambda x, axis: collectives.gather_params(x, P(), axis),
    "sync_gradients": lambda x, axis: collectives.sync_gradients(x, P(), axis),
}


@pytest.mark.parametrize("name", CALLS)
def test_outside_per_device_code_is_an_error(name):
    call, x = CALLS[name], jnp.zeros(8)
    message = f"^{name} names the axis 'fsdp', but this code is not per device along it"
    with pytest.raises(ValueError, match=f"{message}; call it inside eqxshard.filter_sh"):
        call(x, "fsdp")
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=message):
        jax.jit(lambda x: call(x, "fsdp"))(x)
    mapped = eqxshard.filter_shard_map(
        lambda x: call(x, "fsdp"), MESH, P("data"), P("data"), axis_names={"data"}
    )
    with pytest.raises(ValueError, match=message):
        jax.jit(mapped)(x)
    mapped = eqxshard.filter_shard_map(lambda x: call(x, "fdsp"), MESH, P(), P())
    message = f"^{name} names the axis 'fdsp', which the mesh does not have; did you mean"
    with pytest.raises(ValueError, match=message):
        mapped(x)


PART = np.zeros((8, 6), np.float32)


@pytest.mark.parametrize(
    "fn, message",
    [
        (
            lambda x: collectives.all_gather_mean_grad(x, "fsdp", 2),
            r"^all_gather_mean_grad of an array \(2, 6\), which has no dim 2; choose a "
            "dim below 2",
        ),
        (
            lambda x: collectives.psum_scatter(x, "fsdp", -3),
            r"^psum_scatter of an array \(2, 6\), which has no dim -3",
        ),
        (
            lambda x: collectives.pmean_scatter(x, ROWS, 1),
            r"^psum_scatter of an array \(2, 6\): dim 1 of size 6 does not divide over "
            "data=2 x fsdp=4; choose a dim that is a multiple of 8",
        ),
        (
            lambda x: collectives.shard_params({"x": x}, {"x": P(None, "fsdp")}),
            r"^params\.x \(2, 6\): .* splits dim 1 of size 6 over fsdp=4",
        ),
        (
            lambda x: collectives.gather_params({"x": x}, P(None, None, "fsdp"), ROWS),
            r"^params\.x \(2, 6\): .* has 3 entries and the array 2 dims",
        ),
        (
            lambda x: collectives.gather_params({"x": x}, {"y": P()}, ROWS),
            "^specs is not a prefix of params",
        ),
        (
            lambda x: collectives.gather_params({"x": x}, {"x": None}, ROWS),
            r"^specs has None for the array params\.x \(2, 6\); write P\(\)",
        ),
        (
            lambda x: collectives.gather_params(x, P(("fsdp", "tensor")), ROWS),
            r"^params: P\(\('fsdp', 'tensor'\),\) splits dim 0 over \('fsdp', 'tensor'\), "
            "and gathering it over fsdp alone would reorder its rows; name the axes to",
        ),
        (
            lambda x: collectives.sync_gradients({"x": x}, P("fdsp"), ROWS),
            r"^grads\.x .* did you mean 'fsdp'",
        ),
    ],
)
def test_mismatches_are_errors(fn, message):
    with pytest.raises(ValueError, match=message):
        eqxshard.filter_shard_map(fn, MESH, P("fsdp"), P("fsdp"))(PART)
