import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives_helpers import MESH, ROWS, normal, per_device
from helpers import assert_close, assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import eqxshard
from eqxshard.parallel import collectives


@st.composite
def arrays_and_dims(draw):
    """An array of one to three dims, and a dim of it that divides by 8."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= 8
    return normal(*shape), dim


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
        parts = jax.lax.psum_scatter(gathered, axis, scatter_dimension=dim, tiled=True)
        return gathered[None], parts / jax.lax.axis_size(axis)

    stacked, parts = per_device(fn, split, (P(axis), split))(whole)
    for gathered in stacked:
        np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)


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


# Mistakes


CALLS = {
    "all_gather_mean_grad": lambda x, axis: collectives.all_gather_mean_grad(x, axis),
    "shift": lambda x, axis: collectives.shift(x, axis),
    "fold_in_axes": lambda x, axis: collectives.fold_in_axes(jax.random.key(5), axis),
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
            lambda x: collectives.gather_params({"x": x}, P(None, None, "fsdp"), ROWS),
            r"of an array \(2, 6\), which has no dim 2",
        ),
        (
            lambda x: collectives.gather_params({"x": x}, {"y": P()}, ROWS),
            "^specs is not a prefix of params",
        ),
        (
            lambda x: collectives.gather_params(x, P(("fsdp", "tensor")), ROWS),
            r"^params: P\(\('fsdp', 'tensor'\),\) splits dim 0 over \('fsdp', 'tensor'\), "
            "and gathering it over fsdp alone would reorder its rows; name the axes to",
        ),
        (
            lambda x: collectives.sync_gradients({"x": x}, P("fdsp"), ROWS),
            r"^grads\.x.* did you mean 'fsdp'",
        ),
    ],
)
def test_mismatches_are_errors(fn, message):
    with pytest.raises(ValueError, match=message):
        eqxshard.filter_shard_map(fn, MESH, P("fsdp"), P("fsdp"))(PART)
