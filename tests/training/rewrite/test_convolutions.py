"""Convolutions and pools on CPUs: the same numbers, in the form that is fast."""

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
from step_helpers import call_rewritten

import eqxshard
from eqxshard.training._jit import jit_on
from eqxshard.training.rewrite._convolutions import fast_convolutions

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


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, options", [("data=1", {}), ("data=2,fsdp=2", {"accumulate": 2})]
)
def test_steps_are_those_of_jax(mesh, options):
    state, train_step = make(mesh, **options)
    for _ in range(2):
        state, _ = train_step(state, batch())
    assert_model_close(eqx.filter(state.model, eqx.is_array), by_hand(2))


def test_loops_have_convolutions_only_as_xla_has_a_kernel_for():
    """Any other takes ten times as long there: XLA reorders dims outside of loops only."""
    state, train_step = make(accumulate=2)
    text = train_step.lower(state, batch()).as_text("hlo")
    assert set(CONVOLUTION.findall(str(text))) == {"b01f_01io->b01f", "b0f_0io->b0f"}


@pytest.mark.slow
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


def test_what_is_split_over_explicit_axes_stays_as_it_is():
    """Its types say how it is split, which an operation in its place would have to."""
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=kind)
    x = jax.device_put(normal(8, 2, 6, 6), jax.NamedSharding(mesh, jax.P("data")))
    weight = jax.device_put(normal(3, 2, 3, 3), jax.NamedSharding(mesh, jax.P()))

    def loss(weight, x):
        y = jnp.sin(jax.lax.conv(x, weight, (1, 1), "SAME"))
        ones = (1, 1, 2, 2)
        return jnp.sum(jax.lax.reduce_window(y, 0.0, jax.lax.add, ones, ones, "VALID"))

    gradient = jax.grad(loss, (0, 1))
    ours, theirs = jax.jit(fast(gradient))(weight, x), jax.jit(gradient)(weight, x)
    assert [jax.typeof(a) for a in ours] == [jax.typeof(b) for b in theirs]
    assert_model_close(ours, theirs)


def test_no_convolution_is_left_to_ynnpack():
    """It takes five times as long as XLA's own kernel for the gradient of a weight."""
    mesh = make_mesh("data=1")

    def fn(x, weight):
        def loss(weight):
            return jnp.sum(jax.lax.conv(x, weight, (1, 1), "SAME") ** 2)

        return jax.value_and_grad(loss)(weight)

    whole = jax.NamedSharding(mesh, jax.P())
    jitted = jit_on(mesh, fn, "fn", out_shardings=(whole, whole))
    lowered = jitted.lower(jnp.ones((8, 4, 12, 12)), jnp.ones((6, 4, 3, 3)))
    text = lowered.compile().as_text()
    assert len(re.findall(r" convolution\(", text)) == 2
    kinds = re.findall(r"ynn_fusion[^\n]*op_name=\"([^\"]*)\"", text)
    assert not [name for name in kinds if "conv_general_dilated" in name]


# Layers alone


def fast(fn):
    """A function with its convolutions rewritten."""
    return lambda *args: call_rewritten(fn, fast_convolutions, *args)


def slopes(layer, x):
    """The gradients of a layer of one example, for a batch, in its weights and inputs."""
    params, static = eqx.partition(layer, eqx.is_inexact_array)

    def loss(params, x):
        y = jax.nn.relu(jax.vmap(eqx.combine(params, static))(x))
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.grad(loss, (0, 1))(params, x)


def rewritten(layer, x):
    """The gradients of a rewritten layer, and its jaxpr as text."""
    fn = fast(lambda x: slopes(layer, x))
    return jax.jit(fn)(x), str(jax.make_jaxpr(fn)(x))


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"stride": 2, "padding": ((2, 0), (0, 1))},
        {"dilation": 2, "kernel_size": (2, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, 2])
def test_the_first_layer_multiplies_patches(channels, options):
    options = {"kernel_size": 3, **options}
    layer = eqx.nn.Conv2d(channels, 20, **options, key=KEY)
    x = normal(3, channels, 10, 9)
    ours, text = rewritten(layer, x)
    # The gradient of the input is one; that of the weight and of the bias are products.
    assert text.count("conv_general_dilated[") == 2 and text.count("dot_general[") == 2
    assert_model_close(ours, slopes(layer, x))


SPREAD = [
    # The layer, the size of its images, and the padding of the input's gradient by dim.
    (eqx.nn.Conv2d(2, 3, 5, key=KEY), (9, 8), [(0, 0), (4, 4)]),
    (
        eqx.nn.Conv2d(2, 3, (4, 3), padding=[(1, 0), (0, 0)], key=KEY),
        (9, 8),
        [(0, 0), (2, 2)],
    ),
    (eqx.nn.Conv3d(2, 3, 3, key=KEY), (6, 7, 5), [(0, 0), (2, 2), (2, 2)]),
]
WHOLE = [
    # Little padding, in which the sums would cost more than is saved, or another kind.
    (eqx.nn.Conv2d(2, 3, 3, key=KEY), (17, 17), [(2, 2), (2, 2)]),
    (eqx.nn.Conv2d(2, 3, 5, stride=2, key=KEY), (9, 9), [(4, 4), (4, 4)]),
    (eqx.nn.Conv2d(2, 2, 5, groups=2, key=KEY), (9, 9), [(4, 4), (4, 4)]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "size", "padding"), SPREAD + WHOLE)
def test_the_gradient_of_an_input_pads_one_dim_less(layer, size, padding):
    """In that dim, the rows of the kernel are channels, and their results are summed."""
    x = normal(3, 2, *size)
    ours, text = rewritten(layer, x)
    assert f"padding={tuple(padding)}" in text
    assert_model_close(ours, slopes(layer, x))


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (eqx.nn.AvgPool2d(2, 2), (3, 2, 8, 6)),
        (eqx.nn.AvgPool2d((2, 3), (2, 3)), (3, 2, 9, 11)),
        (eqx.nn.AvgPool1d(4, 4), (3, 2, 9)),
    ],
    ids=["whole", "remainder", "line"],
)
def test_pools_have_no_windows(pool, shape):
    ours, text = rewritten(pool, normal(*shape))
    assert "reduce_window" not in text
    assert_model_close(ours, slopes(pool, normal(*shape)))


@pytest.mark.parametrize(
    "pool",
    [eqx.nn.AvgPool2d(3, 2), eqx.nn.AvgPool2d(2, 2, padding=1)],
    ids=["overlapping", "padded"],
)
def test_other_pools_stay_as_they_are(pool):
    x = normal(2, 3, 11, 10)
    ours, text = rewritten(pool, x)
    assert "reduce_window" in text
    assert_model_close(ours, slopes(pool, x))
