import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Model, assert_close, assert_equal, lenient, make_batch, make_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from step_helpers import KEY, make, setup, without_dropout

import eqxshard
from eqxshard.sharding import batch_sharding
from eqxshard.training import Metrics

# Of a train step


@pytest.mark.slow
@pytest.mark.parametrize("mesh, rule", [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")])
def test_weights_of_the_loss_leave_metrics_alone(mesh, rule):
    def loss_fn(model, batch, key):
        losses = without_dropout(model, batch, key)
        return losses, {"plain": losses}

    batch = make_batch()
    model = Model(KEY)
    plain = np.asarray(without_dropout(model, batch, KEY))
    loss_weight, weight = np.linspace(0, 2, 32), (np.arange(32) < 27).astype(float)
    batch |= {"__loss_weight__": np.float32(loss_weight), "__weight__": np.float32(weight)}
    for accumulate in (1, 2):
        state, train_step = make(mesh, rule, loss_fn, accumulate=accumulate)
        values = train_step(state, batch)[1].compute()
        both = weight * loss_weight
        assert values["loss"] == pytest.approx(np.sum(plain * both) / both.sum(), rel=1e-5)
        assert values["plain"] == pytest.approx(plain[:27].mean(), rel=1e-5)


def test_the_gradient_is_that_of_the_weighted_loss():
    batch = make_batch()
    loss_weight = np.linspace(0, 2, 32, dtype=np.float32)
    params, rest = eqx.partition(Model(KEY), eqx.is_inexact_array)

    def loss(params):
        losses = without_dropout(eqx.combine(params, rest), batch, KEY)
        return jnp.sum(losses * loss_weight) / jnp.sum(loss_weight)

    norm = float(optax.tree.norm(jax.grad(loss)(params)))
    state, train_step = make("data=8", "replicate", without_dropout, grad_norms=True)
    values = train_step(state, {**batch, "__loss_weight__": loss_weight})[1].compute()
    assert values["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_loss_of_several_steps_is_the_mean_by_loss_weight():
    model, weight = Model(KEY), np.linspace(0, 2, 96, dtype=np.float32)
    batches = [make_batch(seed=seed) for seed in range(3)]
    losses = [np.asarray(without_dropout(model, batch, KEY)) for batch in batches]
    stacked = {name: np.stack([x[name] for x in batches]) for name in batches[0]}
    stacked["__loss_weight__"] = weight.reshape(3, 32)
    frozen = lenient(optax.sgd(0.0))
    state, train_step = make("data=8", "replicate", without_dropout, frozen)
    _, metrics = train_step.many(state, stacked)
    expected = np.average(np.concatenate(losses), weights=weight)
    assert metrics.compute()["loss"] == pytest.approx(expected, rel=1e-5)
    joined = Metrics.join(model=metrics).compute()
    assert joined["model/loss"] == metrics.compute()["loss"]
    for found, step in zip(metrics["loss"], range(3), strict=True):
        expected = np.average(losses[step], weights=weight.reshape(3, 32)[step])
        assert float(found) == pytest.approx(expected, rel=1e-5)
    # The next batch has no loss weights.
    state, train_step = make("data=8", "replicate", without_dropout, frozen)
    state, first = train_step(state, {**batches[0], "__loss_weight__": weight[:32]})
    _, second = train_step(state, batches[1])
    both = Metrics.stack([first, second]).compute()["loss"]
    weights = np.concatenate([weight[:32], np.ones(32)])
    expected = np.average(np.concatenate(losses[:2]), weights=weights)
    assert both == pytest.approx(expected, rel=1e-5)


DECAY = lenient(optax.adamw(0.1, weight_decay=0.1))
NOTHING = np.zeros(32, np.float32)


@pytest.mark.parametrize(
    "mesh, rule, name, options",
    [
        pytest.param("data=8", "replicate", "__weight__", {}, marks=pytest.mark.slow),
        ("data=2,fsdp=4", "fsdp", "__loss_weight__", {"nonfinite": "ignore"}),
        ("data=8", "replicate", "__weight__", {"accumulate": 2, "grad_norms": True}),
        pytest.param(
            "data=8",
            "replicate",
            "__weight__",
            {"precision": eqxshard.Precision(jnp.float16, scale_every=2)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_batch_of_which_nothing_counts_is_no_step(mesh, rule, name, options):
    """Neither decay nor momentum moves the weights, nor is there anything to average."""
    first, last = make_batch(seed=0), make_batch(seed=1)
    ones = {name: np.ones(32, np.float32)}
    state, train_step = make(mesh, rule, without_dropout, DECAY, **options)
    expected, before = train_step(state, {**first, **ones})
    kept = jax.device_get(eqx.filter(expected, eqx.is_array))
    state, metrics = train_step(expected, {**last, name: NOTHING})
    found = jax.device_get(eqx.filter(state, eqx.is_array))
    assert (int(kept.step), int(found.step)) == (1, 2)
    assert_equal((found.model, found.opt_state), (kept.model, kept.opt_state))
    assert_equal(found.loss_scale, kept.loss_scale)
    # It is not counted, neither in means nor among the steps that are not finite.
    both = Metrics.stack([before, metrics]).compute()
    assert both == pytest.approx(before.compute())
    _, metrics = train_step(state, {**last, **ones})
    assert metrics.compute()["loss"] > 0 and "nonfinite" not in metrics.compute()


def test_several_steps_leave_out_those_of_which_nothing_counts():
    batches = [make_batch(seed=seed, weight=np.ones(32)) for seed in range(3)]
    batches[1]["__weight__"] = NOTHING
    state, train_step = make("data=8", "replicate", without_dropout, DECAY)
    stacked = {name: np.stack([x[name] for x in batches]) for name in batches[0]}
    found, metrics = train_step.many(state, stacked)
    expected, _ = make("data=8", "replicate", without_dropout, DECAY)
    for batch in (batches[0], batches[2]):
        expected, _ = train_step(expected, batch)
    assert_close((found.model, found.opt_state), (expected.model, expected.opt_state))
    assert int(found.step) == 3
    np.testing.assert_array_equal(metrics.weight, [32, 0, 32])


def mistakes(model, batch):
    return jnp.argmax(without_dropout(model, batch, KEY)[:, None] - 1, axis=-1) != 0


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype, of_mistakes",
    [
        ("bool", lambda x: x),
        ("int32", lambda x: x.astype(jnp.int32)),
        ("int32", lambda x: jnp.sum(x.astype(jnp.int32))),
        ("int", lambda x: 0),
    ],
)
def test_a_loss_without_a_gradient_is_refused(dtype, of_mistakes, accumulate):
    """JAX's gradient of integers is 0, and the weights would stay as they are."""

    def loss_fn(model, batch, key):
        return of_mistakes(mistakes(model, batch))

    state, step = make("data=8", "replicate", loss_fn, accumulate=accumulate)
    with pytest.raises(TypeError, match=rf"the loss is {dtype}.*; return floating"):
        step(state, make_batch())


def test_metrics_may_be_of_integers_and_booleans():
    def loss_fn(model, batch, key):
        wrong = mistakes(model, batch)
        metrics = {"wrong": wrong, "count": wrong.astype(jnp.int32) + 2}
        return without_dropout(model, batch, key), metrics

    state, step = make("data=8", "replicate", loss_fn, accumulate=2)
    values = step(state, make_batch())[1].compute()
    assert (values["wrong"], values["count"]) == (0, 2)


def test_a_scalar_cannot_leave_padding_out():
    def scalar_loss(model, batch, key):
        return jnp.mean(without_dropout(model, batch, key))

    def scalar_metric(model, batch, key):
        losses = without_dropout(model, batch, key)
        return losses, {"double": jnp.mean(2 * losses)}

    padded = make_batch(weight=np.ones(32, np.float32))
    weighted = make_batch() | {"__loss_weight__": np.ones(32, np.float32)}
    for name, loss_fn, entry, batch in (
        ("loss", scalar_loss, "__weight__", padded),
        ("double", scalar_metric, "__weight__", padded),
        ("loss", scalar_loss, "__loss_weight__", weighted),
    ):
        state, train_step = make("data=8", "replicate", loss_fn)
        with pytest.raises(ValueError, match=f"{name} is one number .* '{entry}'; return"):
            train_step(state, batch)
    eval_step = eqxshard.make_eval_step(lambda model, batch: {"m": jnp.mean(batch["x"])})
    with pytest.raises(ValueError, match=r"m is one number .* remainder='drop'"):
        eval_step(state.model, padded)


def test_negative_weights_are_refused():
    state, train_step = setup()
    eval_step = eqxshard.make_eval_step(lambda model, batch: {"x": batch["x"][:, 0]})
    weight = np.where(np.arange(32) == 5, -1, 1).astype(np.float32)
    batch = make_batch(weight=weight)
    refused = pytest.raises(ValueError, match=r"'__weight__' is -1.* row 5.*; give weights")
    placed = eqxshard.filter_shard(batch, batch_sharding(make_mesh()))
    # If arrays are on the devices, only the first call of a step reads the weights.
    with refused:
        train_step(state, batch)
    for made in (batch, placed):
        with refused:
            eval_step(state.model, made)
    # A loss may count negatively, as long as the sum does not.
    with pytest.raises(
        ValueError, match=r"the sum of '__loss_weight__' .* negative.*; giv"
    ):
        train_step(state, make_batch() | {"__loss_weight__": -weight})
    train_step(state, make_batch() | {"__loss_weight__": weight})


@pytest.mark.parametrize("name", ["__weight__", "__loss_weight__"])
def test_weights_are_finite_numbers_of_any_type(name):
    state, train_step = setup()
    for wrong in (np.nan, np.inf):
        weight = np.where(np.arange(32) == 5, wrong, 1).astype(np.float32)
        with pytest.raises(ValueError, match=rf"'{name}' is {wrong}, .* row 5; give"):
            train_step(state, make_batch() | {name: weight})
    # As int8, the product of the two is negative.
    weights = {each: np.full(32, 12, np.int8) for each in ("__weight__", "__loss_weight__")}
    _, metrics = train_step(setup()[0], make_batch() | weights)
    _, plain = train_step(setup()[0], make_batch())
    assert metrics.compute()["loss"] == pytest.approx(plain.compute()["loss"], rel=1e-6)


def test_weights_that_turn_negative_on_the_devices_skip_the_step():
    state, train_step = setup()
    sharding = batch_sharding(make_mesh())
    for name in ("__weight__", "__loss_weight__"):
        good = eqxshard.filter_shard(
            make_batch() | {name: np.ones(32, np.float32)}, sharding
        )
        state, _ = train_step(state, good)
        before = np.asarray(state.model.last.weight)
        state, metrics = train_step(state, good | {name: -good[name]})
        assert metrics.compute()["nonfinite"] == 1
        np.testing.assert_array_equal(state.model.last.weight, before)


def test_a_scalar_that_microbatches_average_is_said():
    mask = np.where(np.arange(32) % 4 == 0, 0.01, 1.0).astype(np.float32)
    batch = make_batch() | {"mask": mask}

    def masked(model, batch, key):
        losses = without_dropout(model, batch, key)
        metrics = {"constant": jnp.float32(3.0)}
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"]), metrics

    def per_example(model, batch, key):
        return without_dropout(model, batch, key)

    state, train_step = make("data=8", "replicate", masked, accumulate=4)
    with pytest.warns(UserWarning, match=r"^loss: .* accumulate=4 .*; otherwise") as said:
        for _ in range(2):
            state, _ = train_step(state, batch)
    assert len([w for w in said if "accumulate" in str(w.message)]) == 1
    # The remedy is exact.
    losses = []
    for loss_fn, fed, count in (
        (masked, batch, 1),
        (per_example, batch | {"__loss_weight__": mask}, 4),
    ):
        state, train_step = make("data=8", "replicate", loss_fn, accumulate=count)
        losses.append(train_step(state, fed)[1].compute()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_scalar_may_apply_the_weights_itself():
    def loss_fn(model, batch, key):
        losses = without_dropout(model, batch, key)
        mean = jnp.sum(losses * batch["__weight__"]) / jnp.sum(batch["__weight__"])
        return mean, {"constant": jnp.float32(3), "of_the_model": jnp.sum(model.last.bias)}

    batch = make_batch(weight=np.float32(np.arange(32) < 27))
    one, step_one = make("data=8", "replicate", without_dropout)
    two, step_two = make("data=8", "replicate", loss_fn)
    one, expected = step_one(one, batch)
    two, metrics = step_two(two, batch)
    assert_close(one, two)
    assert metrics.compute()["loss"] == pytest.approx(expected.compute()["loss"], rel=1e-6)
    assert metrics.compute()["constant"] == 3


# Of an eval step


def measure(values, rows=8, weight=None):
    """The means that an eval step takes of the values of a user's function."""
    mesh = eqxshard.make_mesh(data=2, devices=jax.devices()[:2])
    step = eqxshard.make_eval_step(
        lambda model, batch: values, mesh=mesh, rule=eqxshard.replicate()
    )
    batch = {"x": np.zeros(rows, np.float32)}
    return step(None, batch if weight is None else batch | {"__weight__": weight}).compute()


def test_values_of_any_type_and_scalars():
    values = {
        "bool": np.arange(8) < 2,
        "integer": np.arange(8),
        "half": jnp.ones(8, jnp.bfloat16),
        "python": 0.5,
        "scalar": jnp.asarray(3),
    }
    means = {"bool": 0.25, "integer": 3.5, "half": 1.0, "python": 0.5, "scalar": 3.0}
    assert measure(values) == means


@settings(deadline=None, max_examples=15)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=8, max_size=8),
    weight=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=8, max_size=8),
)
def test_means_are_weighted(values, weight):
    result = measure(
        {"value": np.array(values, np.float32), "scalar": 2.0},
        weight=np.array(weight, np.float32),
    )
    if sum(weight):
        expected = np.average(values, weights=weight)
        assert result == pytest.approx(
            {"value": expected, "scalar": 2.0}, rel=1e-4, abs=1e-3
        )
    else:
        assert math.isnan(result["value"])
