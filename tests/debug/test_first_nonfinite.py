"""The first value of a step that is not finite: its line, its rows, its arrays."""

import functools as ft
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient

import eqxshard
from eqxshard.debug import FirstNonfinite
from eqxshard.sharding import batch_sharding

SGD = lenient(optax.sgd(0.1))
RULE = eqxshard.fsdp(min_size=8)
ROWS = 8


class Net(eqx.Module):
    """Two layers, with a positive output."""

    layers: list[eqx.nn.Linear]

    def __init__(self, key):
        keys = jax.random.split(key)
        self.layers = [eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1])]

    def __call__(self, x):
        return jnp.square(self.layers[1](jnp.tanh(self.layers[0](x)))[0]) + 1


def example_batch(**entries: Any) -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, **{name: np.asarray(x, np.float32) for name, x in entries.items()}}


def make_mesh(explicit: bool = False) -> jax.sharding.Mesh:
    devices = jax.devices()[:4]
    return eqxshard.make_mesh(data=-1, fsdp=2, devices=devices, explicit=explicit)


@ft.cache
def make(
    loss_fn: Any,
    make_model: Any,
    optim: Any,
    precision: Any,
    explicit: bool,
    **options: Any,
) -> tuple[eqxshard.TrainState, Any]:
    """The first state on four devices, which no test gives away, and a step."""
    where: dict[str, Any] = {"mesh": make_mesh(explicit), "rule": RULE}
    state = eqxshard.init_state(
        make_model, optim, key=jax.random.key(0), precision=precision, **where
    )
    return state, eqxshard.make_train_step(loss_fn, optim, **options)


def find(
    loss_fn: Any,
    batch: Any,
    make_model: Any = Net,
    *,
    optim: Any = SGD,
    change: Any = lambda model: model,
    extra: Any = None,
    precision: Any = None,
    explicit: bool = False,
    **options: Any,
) -> FirstNonfinite | None:
    """The result of `first_nonfinite` for a first step on four devices."""
    state, step = make(loss_fn, make_model, optim, precision, explicit, **options)
    state = eqx.tree_at(lambda state: state.model, state, change(state.model))
    return eqxshard.first_nonfinite(step, state, batch, extra)


def found(*args: Any, **options: Any) -> FirstNonfinite:
    result = find(*args, **options)
    assert result is not None
    return result


def line(fn: Any, after: int) -> str:
    """A line of a function, counted from its `def`, as a result has it."""
    code = fn.__code__
    return f"{Path(__file__)}:{code.co_firstlineno + after} ({code.co_qualname})"


def predict(model: Any, batch: Any) -> Any:
    return jax.vmap(model)(batch["x"])


# The loss


class Root(eqx.Module):
    """A layer that makes NaN of negative numbers."""

    weight: jax.Array

    def __call__(self, x):
        return jnp.sqrt(x * self.weight)


class Roots(eqx.Module):
    """Stacked layers, of which the third has a negative weight."""

    layers: Root

    def __init__(self, key):
        self.layers = Root(jnp.ones((4, 8)).at[2].set(-1))

    def __call__(self, x):
        return eqxshard.scan_layers(self.layers, x).sum()


def roots(model, batch, key):
    x = jnp.concatenate([jnp.abs(batch["x"])] * 2, axis=1)
    return jax.vmap(model)(x) * batch["y"]


def test_the_line_in_a_layer_the_layer_and_the_rows_are_named():
    says = found(roots, example_batch(y=np.ones(ROWS)), Roots)
    assert (says.part, says.value, says.operation) == ("loss", "NaN", "sqrt")
    assert says.line == line(Root.__call__, 1)
    assert says.rounds == (2,) and says.rows == (*range(ROWS),)
    assert str(says) == (
        f"the first NaN appears in sqrt, {says.line}, in round 2 (counted from 0) of the "
        "loop around it; the loss is not finite in rows [0, 1, 2, 3, 4, 5, 6, 7] of the "
        "batch."
    )


def product(model, batch, key):
    return predict(model, batch) * batch["y"]


def test_rows_of_the_batch_and_their_examples_are_named():
    y = np.ones(ROWS)
    y[[2, 5]] = [np.nan, np.inf]
    says = found(product, example_batch(y=y))
    assert (says.given, says.rows, says.line) == ("batch entry y", (2, 5), None)
    assert says.describe(range(20, 28)) == (
        "batch entry y contains NaN; the loss is not finite in rows [2, 5] of the batch "
        "(examples [22, 25] of the source)."
    )


def test_a_parameter_is_named():
    def change(model):
        return eqx.tree_at(
            lambda m: m.layers[1].bias, model, model.layers[1].bias * jnp.nan
        )

    says = found(product, example_batch(y=np.ones(ROWS)), change=change)
    assert says.given == "the parameter layers.1.bias" and says.value == "NaN"


def masked(model, batch, key):
    logits = jnp.stack([predict(model, batch)] * 3, axis=1)
    logits = jnp.where(batch["mask"] > 0, logits, -jnp.inf)
    return jnp.square(jax.nn.softmax(logits)).sum(-1) - jnp.log(batch["y"])


@pytest.mark.slow
def test_the_infinity_of_a_mask_counts_only_where_it_becomes_nan():
    mask = np.ones((ROWS, 3))
    mask[:, 0] = 0
    y = np.ones(ROWS)
    assert find(masked, example_batch(mask=mask, y=y)) is None
    y[4] = 0
    says = found(masked, example_batch(mask=mask, y=y))
    assert (says.value, says.operation, says.rows) == ("infinity", "log", (4,))
    mask[6] = 0
    says = found(masked, example_batch(mask=mask, y=np.ones(ROWS)))
    assert (says.value, says.line, says.rows) == ("NaN", line(masked, 3), (6,))


def unlikely(model, batch, key):
    logs = jnp.log(jnp.abs(batch["y"]))
    known = jnp.where(logs > -9, logs, 0) + jnp.sqrt(batch["z"])
    return predict(model, batch) + known


@pytest.mark.slow
def test_rows_of_weight_0_and_what_where_leaves_out_count_for_nothing():
    y, z, weight = np.ones(ROWS), np.ones(ROWS), np.ones(ROWS)
    # Left out by `where`; a row that does not count; what makes the loss NaN.
    y[1], z[[2, 3]], weight[2] = 0, -1, 0
    x = example_batch()["x"]
    x[2] = np.nan
    batch = example_batch(y=y, z=z) | {"x": x, "__weight__": weight.astype(np.float32)}
    says = found(unlikely, batch)
    assert (says.operation, says.line, says.rows) == ("sqrt", line(unlikely, 2), (3,))
    batch["z"][3] = 1
    assert find(unlikely, batch) is None


# Gradients and updates


def safe_log(model, batch, key):
    y = predict(model, batch) * batch["y"]
    logs = jnp.log(y)
    return jnp.where(y > 0, logs, 0)


def test_the_line_is_named_whose_gradient_is_nan_though_its_value_is_not_used():
    y = np.ones(ROWS)
    y[[1, 6]] = 0
    says = found(safe_log, example_batch(y=y))
    assert (says.part, says.line, says.rows) == ("gradient", line(safe_log, 2), (1, 6))
    assert says.arrays[:3] == ("layers.0.weight", "layers.0.bias", "layers.1.weight")
    assert "; the loss is finite, and the gradient of layers.0.weight, " in str(says)


def test_an_update_is_named():
    def flat(model, batch, key):
        return product(model, batch, key) * 0

    optim = lenient(optax.adam(0.1, eps=0.0))
    says = found(flat, example_batch(y=np.ones(ROWS)), optim=optim)
    assert (says.part, says.value, says.operation) == ("update", "NaN", "div")
    assert says.arrays[0] == "model.layers.0.weight"
    assert "; the loss and its gradients are finite, and the new value of " in str(says)


# The options of a step


@pytest.mark.slow
def test_on_explicit_axes_the_line_the_layer_and_the_rows_are_named():
    y, z = np.ones(ROWS), np.ones(ROWS)
    assert find(unlikely, example_batch(y=y, z=z), explicit=True) is None
    z[3] = -1
    says = found(unlikely, example_batch(y=y, z=z), explicit=True)
    assert (says.operation, says.line, says.rows) == ("sqrt", line(unlikely, 2), (3,))
    says = found(roots, example_batch(y=y), Roots, explicit=True)
    assert (says.line, says.rounds) == (line(Root.__call__, 1), (2,))


@pytest.mark.parametrize("explicit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_line_of_code_for_each_device_is_named(explicit):
    mesh = make_mesh(explicit)
    rows = batch_sharding(mesh).spec

    def logs(y):
        return jnp.log(y) + jax.lax.pmean(y.sum(), ("data", "fsdp"))

    def per_device(model, batch, key):
        y = predict(model, batch) * batch["y"]
        return jax.shard_map(logs, mesh=mesh, in_specs=rows, out_specs=rows)(y)

    y = np.ones(ROWS)
    assert find(per_device, example_batch(y=y), explicit=explicit) is None
    y[3] = -1
    says = found(per_device, example_batch(y=y), explicit=explicit)
    assert (says.operation, says.line, says.rows) == ("log", line(logs, 1), (3,))


def repeated(times, model, batch, key):
    logs = jnp.log(batch["y"])
    logs, _ = jax.lax.scan(lambda x, _: (x * 2, None), logs, None, length=times)
    return predict(model, batch) + logs


@pytest.mark.parametrize("times", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_without_a_round_passes_on_what_it_was_given(times):
    y = np.ones(ROWS)
    loss_fn = ft.partial(repeated, times)
    assert find(loss_fn, example_batch(y=y)) is None
    y[3] = -1
    says = found(loss_fn, example_batch(y=y))
    assert (says.operation, says.line, says.rows) == ("log", line(repeated, 1), (3,))


@pytest.mark.slow
def test_microbatches_are_the_rows_that_they_were():
    y, z = np.ones(ROWS), np.ones(ROWS)
    z[[1, 6, 7]] = -1
    says = found(unlikely, example_batch(y=y, z=z), accumulate=2)
    assert (says.line, says.rows, says.rounds) == (line(unlikely, 2), (1, 6, 7), (0,))
    y[[3, 5]] = 0
    says = found(safe_log, example_batch(y=y), accumulate=2)
    assert (says.part, says.rows, says.rounds) == ("gradient", (3, 5), (1,))


def overflow(model, batch, key):
    return predict(model, batch) * jnp.exp(batch["y"])


@pytest.mark.slow
def test_the_type_that_is_computed_in_counts():
    y = np.ones(ROWS)
    y[3] = 20
    assert find(overflow, example_batch(y=y)) is None
    precision = eqxshard.Precision(compute=jnp.float16)
    says = found(overflow, example_batch(y=y), precision=precision)
    assert (says.value, says.operation, says.line) == ("infinity", "exp", line(overflow, 1))
    assert says.rows == (3,)


class Normed(eqx.Module):
    """A layer and a `BatchNorm`."""

    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.layer = eqx.nn.Linear(4, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.layer(x), state)
        return x.sum(), state


def normed(pair, batch, key, teacher):
    model, state = pair
    call = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    out, state = call(batch["x"], state)
    return out / teacher["scale"], state


@pytest.mark.slow
def test_models_with_state_and_extras():
    make_model = eqx.nn.make_with_state(Normed)
    for scale in (1.0, 0.0):
        extra = {"scale": jnp.asarray(scale)}
        says = find(normed, example_batch(), make_model, extra=extra)
        assert (says is None) == bool(scale)
    assert says is not None and says.line == line(normed, 4) and says.operation == "div"
