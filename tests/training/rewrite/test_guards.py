"""Programs that XLA splits over a mesh wrongly: with guards, as on one device."""

import itertools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grades import graded
from helpers import lenient
from jax.sharding import PartitionSpec as P

import eqxshard

KEY = jax.random.key(0)
OPTIM = lenient(optax.sgd(1.0))
ROWS = ("data", "fsdp")
#: With axes that split no batch, and that may split something else.
MESHES: dict[str, Any] = {
    "data x tensor": {"data": 2, "tensor": 4},
    "data x context x tensor": {"data": 2, "context": 2, "tensor": 2},
    "fsdp x expert": {"data": 1, "fsdp": 2, "expert": 4},
}
DATA: dict[str, Any] = {"data": {"data": 8}}
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(16, 8, 6, 6)).astype(np.float32),
    "rows": RANDOM.normal(size=(16, 12)).astype(np.float32),
    "i": RANDOM.integers(1, 12, (16, 4)).astype(np.int32),
}


def convolve(x, weight, groups=1, stride=1, layout=("NCHW", "OIHW", "NCHW"), **options):
    return jax.lax.conv_general_dilated(
        x,
        weight,
        (stride,) * (weight.ndim - 2),
        options.pop("padding", "SAME"),
        dimension_numbers=layout if weight.ndim == 4 else None,
        feature_group_count=groups,
        **options,
    )


def mean_square(y):
    return jnp.mean(y**2, axis=tuple(range(1, y.ndim)))


def split(x, *spec):
    return eqxshard.constrain(x, P(*spec))


def grouped(weight, batch):
    return mean_square(convolve(batch["x"], weight, groups=4))


def depthwise(weight, batch):
    y = convolve(batch["x"], weight, groups=8, stride=2)
    return mean_square(jax.checkpoint(jnp.tanh)(y))


def channels_last(weight, batch):
    x = jnp.moveaxis(batch["x"], 1, -1)
    return mean_square(convolve(x, weight, groups=2, layout=("NHWC", "HWIO", "NHWC")))


def rows_in_the_middle(weight, batch):
    """A layout in which the dim of the examples is not known."""
    x = jnp.transpose(batch["x"], (2, 3, 0, 1))
    y = convolve(x, weight, groups=2, layout=("HWNC", "HWIO", "HWNC"))
    return jnp.mean(y**2, axis=(0, 1, 3))


def causal(weight, batch):
    x = batch["x"].reshape(16, 8, 36)
    return mean_square(convolve(x, weight, groups=8, padding=[(3, 0)]))


def scanned(weight, batch):
    def layer(x, weight):
        return (jnp.tanh(convolve(x, weight, groups=4)), None)

    return mean_square(jax.lax.scan(layer, batch["x"], weight)[0])


def split_rows_of_pixels(weight, batch):
    x = split(batch["x"], ROWS, None, "context")
    return mean_square(split(convolve(x, weight), ROWS, None, "context"))


def split_pixels_and_groups(weight, batch):
    x = split(batch["x"], ROWS, None, "context")
    return mean_square(convolve(x, weight, groups=8))


def ensemble(weight, batch):
    """An ensemble: each kernel has inputs of its own."""
    x = batch["x"].reshape(16, 4, 2, 6, 6)

    def one(weight, x):
        return mean_square(convolve(x, weight))

    return jnp.sum(jax.vmap(one, in_axes=(0, 1))(weight, x), axis=0)


def kernel_of_each_example(weight, batch):
    kernels = jnp.einsum("oi...,ni->noi...", weight, jnp.mean(batch["x"], (2, 3)))

    def one(kernel, x):
        return jnp.mean(convolve(x[None], kernel) ** 2)

    return jax.vmap(one)(kernels, batch["x"])


def gradients_of_each_example(weight, batch):
    def loss(weight, x):
        return jnp.mean(jnp.tanh(convolve(x[None], weight, groups=4)) ** 2)

    grads = jax.vmap(jax.grad(loss), in_axes=(None, 0))(weight, batch["x"])
    return jnp.sum(grads**2, axis=(1, 2, 3, 4))


def signal_of_the_batch(weight, batch):
    return jnp.convolve(batch["x"][:, 0, 0, 0], weight, mode="same") ** 2


def per_device_along_an_axis(weight, batch):
    def fn(weight, x):
        return mean_square(convolve(x, weight, groups=8))

    if "tensor" not in jax.sharding.get_abstract_mesh().axis_names:
        return fn(weight, batch["x"])
    mapped = eqxshard.filter_shard_map(
        fn, None, in_specs=(P(), P()), out_specs=P(), axis_names={"tensor"}
    )
    return mapped(weight, batch["x"])


def per_device_along_the_rows(fn, array, batch):
    """Code in which JAX tracks what varies over the rows."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        return fn(array, batch)
    mapped = eqxshard.filter_shard_map(
        fn, None, in_specs=(P(), P(ROWS)), out_specs=P(ROWS), axis_names={*ROWS}
    )
    return mapped(array, batch)


def grouped_per_device(weight, batch):
    def fn(weight, x):
        # The same twice, of which JAX refuses a mixture of what varies and what does not.
        return mean_square(convolve(convolve(x, weight, groups=4), weight, groups=4))

    return per_device_along_the_rows(fn, weight, batch["x"])


CONVOLUTIONS = {
    grouped: (8, 2, 3, 3),
    depthwise: (8, 1, 3, 3),
    channels_last: (3, 3, 4, 8),
    rows_in_the_middle: (3, 3, 4, 8),
    causal: (8, 1, 4),
    scanned: (3, 8, 2, 3, 3),
    split_rows_of_pixels: (8, 8, 3, 3),
    split_pixels_and_groups: (8, 1, 3, 3),
    ensemble: (4, 4, 2, 3, 3),
    kernel_of_each_example: (4, 8, 3, 3),
    gradients_of_each_example: (8, 2, 3, 3),
    signal_of_the_batch: (5,),
    per_device_along_an_axis: (8, 1, 3, 3),
    grouped_per_device: (8, 2, 3, 3),
}


def lookup_of_all_but_the_last(table, batch):
    i = batch["i"][:, 0]
    return jnp.sum((table[i[:-1]] - 2 * jnp.sin(table[i[1:]])) ** 2)


def lookup_in_a_split_sequence(table, batch):
    i = split(batch["i"], ROWS, "context")
    return jnp.sum(jnp.sin(table[i[:, :-1]]) * table[i[:, 1:]], axis=(1, 2))


def lookup_of_flat_rows(table, batch):
    i = batch["i"].ravel()
    return jnp.sum(jnp.sin(table[i[:-3]]) * table[i[3:]])


def segments(reduce, table, batch):
    values = (batch["rows"] @ table)[:-1]
    out = reduce(values, batch["i"][:-1, 0], 12)
    # The maximum or minimum of a segment without values is infinite.
    return jnp.sum(jnp.where(jnp.isfinite(out), jnp.tanh(out), 0))


def sums_of_segments(table, batch):
    return segments(jax.ops.segment_sum, table, batch)


def most_of_segments(table, batch):
    return segments(jax.ops.segment_max, table, batch)


def least_of_segments(table, batch):
    return segments(jax.ops.segment_min, table, batch)


def products_at_indices(table, batch):
    # JAX has its gradient only if indices are unique.
    factors = jax.lax.stop_gradient(batch["rows"] @ table)[1:, 0]
    out = jnp.ones(12).at[batch["i"][:-1, 0]].multiply(factors)
    return jnp.sum(jnp.tanh(out)) + jnp.sum(table**2)


def flags_at_indices(table, batch):
    flags = (batch["rows"] @ jax.lax.stop_gradient(table))[1:, 0] > 0
    out = jnp.zeros(12, bool).at[batch["i"][:-1, 0]].max(flags)
    return jnp.sum(out.astype(jnp.float32)) + jnp.sum(table**2)


def sorted_rows(table, batch):
    return jnp.sum(jnp.sort((batch["rows"] @ table)[:-1], axis=0) * jnp.arange(4.0)[None])


def lookup_per_device(table, batch):
    def fn(table, i):
        rows = jax.vmap(jax.vmap(lambda row: jnp.tanh(table @ row)))(table[i[:, 1:]])
        return jnp.sum(rows, axis=(1, 2))

    return per_device_along_the_rows(fn, table, batch["i"])


SCATTERS = [
    lookup_per_device,
    lookup_of_all_but_the_last,
    lookup_in_a_split_sequence,
    lookup_of_flat_rows,
    sums_of_segments,
    most_of_segments,
    least_of_segments,
    products_at_indices,
    flags_at_indices,
    sorted_rows,
]


class OneArray(eqx.Module):
    """A model of one array."""

    array: jax.Array


def gradient_and_value(fn, shape, sizes, rule=None, precision=None, **options):
    """The gradient of a step, which SGD subtracts, and the value of an evaluation."""
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    where = {"mesh": eqxshard.make_mesh(**sizes), "rule": rule or eqxshard.replicate()}

    def make(key):
        return OneArray(jnp.asarray(array))

    def measure(model, batch):
        return {"value": fn(model.array, batch)}

    def loss_fn(model, batch, key):
        return fn(model.array, batch)

    state = eqxshard.init_state(make, OPTIM, key=KEY, precision=precision, **where)
    evaluate = eqxshard.make_eval_step(measure, precision=precision, lint="off")
    value = evaluate(state.model, BATCH).compute()["value"]
    train_step = eqxshard.make_train_step(loss_fn, OPTIM, lint="off", **options)
    state, _ = train_step(state, BATCH)
    return array - np.asarray(state.model.array), value


def by_plain_jax(fn, shape):
    array = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    batch = jax.tree.map(jnp.asarray, BATCH)
    value, grad = jax.value_and_grad(lambda array: jnp.mean(fn(array, batch)))(array)
    return np.asarray(grad), float(value)


def on_meshes(fns, meshes, mesh, some):
    """All functions on one mesh, for other versions of JAX, too; `some` also on another."""

    def marks(fn, where):
        if where == mesh:
            yield pytest.mark.versions
        elif fn not in some or where != "fsdp x expert":
            yield pytest.mark.thorough
        if fn not in some or where != mesh:
            yield pytest.mark.slow

    cases = itertools.product(fns, meshes)
    return [pytest.param(*case, marks=[*marks(*case)]) for case in cases]


EACH_CONVOLUTION = on_meshes(
    CONVOLUTIONS,
    MESHES,
    "data x context x tensor",
    [
        grouped,
        causal,
        split_rows_of_pixels,
        ensemble,
        gradients_of_each_example,
        grouped_per_device,
    ],
)


@pytest.mark.parametrize("fn, mesh", EACH_CONVOLUTION)
def test_a_convolution_learns_the_same_on_every_mesh(fn, mesh):
    shape = CONVOLUTIONS[fn]
    got, want = gradient_and_value(fn, shape, MESHES[mesh]), by_plain_jax(fn, shape)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


EACH_SCATTER = on_meshes(
    SCATTERS,
    MESHES | DATA,
    "data x tensor",
    [
        lookup_per_device,
        lookup_in_a_split_sequence,
        sums_of_segments,
        flags_at_indices,
        sorted_rows,
    ],
)


@pytest.mark.parametrize("fn, mesh", EACH_SCATTER)
def test_a_scatter_adds_no_padding(fn, mesh):
    got, want = (
        gradient_and_value(fn, (12, 4), (MESHES | DATA)[mesh]),
        by_plain_jax(fn, (12, 4)),
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


OPTIONS = {
    "fsdp": {"rule": eqxshard.fsdp(min_size=1)},
    "accumulate": {"accumulate": 2},
    "bfloat16": {"precision": eqxshard.Precision("bfloat16")},
    "on Explicit axes": {"explicit": True},
}


def beside_code_per_device(weight, batch):
    """Whose types of Explicit axes stay in the program."""
    tanh = jnp.tanh
    if "data" in jax.sharding.get_abstract_mesh().axis_names:
        rows = P("fsdp")
        tanh = eqxshard.filter_shard_map(tanh, None, in_specs=rows, out_specs=rows)
    return grouped(weight, batch | {"x": tanh(batch["x"])})


# A sum over the segments of a batch is not that of its parts, and JAX itself refuses to cut
# an array on Explicit axes so that a dim does not divide.
CASES = [(grouped, name) for name in OPTIONS]
CASES += [(beside_code_per_device, "on Explicit axes")]
CASES += [(sums_of_segments, name) for name in ("fsdp", "bfloat16")]


QUICK = [(grouped, "fsdp"), CASES[4], (sums_of_segments, "bfloat16")]


@pytest.mark.parametrize("fn, name", graded(CASES, QUICK, CASES))
def test_options_of_a_step_leave_guards_in_place(fn, name):
    options = {**OPTIONS[name]}
    explicit = {"explicit": True} if options.pop("explicit", False) else {}
    shape = (12, 4) if fn in SCATTERS else CONVOLUTIONS[grouped]
    sizes = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2, **explicit}
    got, want = gradient_and_value(fn, shape, sizes, **options), by_plain_jax(fn, shape)
    error = 3e-2 if name == "bfloat16" else 1e-4
    assert np.linalg.norm(got[0] - want[0]) < error * np.linalg.norm(want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=error)


@pytest.mark.parametrize("mesh", ["data", "data x tensor"])
@pytest.mark.parametrize(
    "fn", graded([grouped, depthwise, causal], [grouped], [depthwise, causal])
)
def test_convolutions_with_groups_gather_no_examples(fn, mesh):
    def make(key):
        return OneArray(jnp.ones(CONVOLUTIONS[fn]))

    mesh = eqxshard.make_mesh(**(MESHES | DATA)[mesh])
    where = {"mesh": mesh, "rule": eqxshard.replicate()}
    state = eqxshard.init_state(make, OPTIM, key=KEY, **where)
    train_step = eqxshard.make_train_step(lambda m, b, key: fn(m.array, b), OPTIM)
    text = train_step.lower(state, BATCH).compile().as_text() or ""
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
