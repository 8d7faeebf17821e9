from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, lenient, make_batch, needs_new_jax, once
from step_helpers import make

import eqxshard


class Layers(eqx.Module):
    first: jax.Array
    last: jax.Array


@pytest.fixture(scope="module")
def run():
    """Three steps under FSDP: the state, and the weights after each step."""
    average = eqxshard.ema_weights(0.2), eqxshard.ema_weights(0.75, warmup=False)
    optim = lenient(optax.chain(optax.sgd(0.1), *average))
    state, train_step = make("data=2,fsdp=4", "fsdp", optim=optim)
    weights = [arrays(state.model)]
    for seed in range(3):
        state, _ = train_step(state, make_batch(seed=seed))
        weights.append(arrays(state.model))
    return state, weights


def average_by_hand(weights, decays):
    expected = {path: array.astype(np.float64) for path, array in weights[0].items()}
    for later, decay in zip(weights[1:], decays, strict=True):
        for path in expected:
            expected[path] = decay * expected[path] + (1 - decay) * later[path]
    return expected


def test_the_first_updates_keep_less_of_the_initial_weights(run):
    state, weights = run
    expected = average_by_hand(weights, [1 / 10, 2 / 11, 0.2])
    warm = state.opt_state[1]
    assert warm.count == 3
    for path, found in arrays(warm.ema).items():
        np.testing.assert_allclose(found, expected[path], rtol=1e-5, atol=1e-7)


def test_it_is_sharded_like_the_weights(run):
    state, _ = run
    model = eqxshard.ema_model(state)
    assert model.first.weight.sharding == state.model.first.weight.sharding
    assert model.permutation is state.model.permutation
    assert model.dropout == state.model.dropout


def test_a_state_without_an_average_is_refused():
    state, _ = make("data=1", "replicate", optim=lenient(optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"make it with optax\.chain\(\.\.\., eqx"):
        eqxshard.ema_model(state)


def test_the_average_of_half_precision_moves():
    """In bfloat16 a thousandth of a change would be lost to rounding."""
    optim = lenient(optax.chain(optax.sgd(0.1), eqxshard.ema_weights(0.999)))
    rule, precision = eqxshard.zero1(min_size=1), eqxshard.Precision(params=jnp.bfloat16)
    state, train_step = make("data=2", rule, optim=optim, precision=precision)
    before = np.asarray(state.opt_state[1].ema.first.bias)
    state, _ = train_step(state, make_batch())
    after = state.opt_state[1].ema.first.bias
    assert after.dtype == jnp.float32 and np.all(np.asarray(after) != before)
    assert eqxshard.ema_model(state).first.bias.dtype == jnp.bfloat16


PARTS = {
    "masked": optax.masked(
        eqxshard.ema_weights(0.9), lambda ps: jax.tree.map(lambda x: x.ndim == 2, ps)
    ),
    "per_layer": eqxshard.per_layer(eqxshard.ema_weights(0.9), "first"),
}


@pytest.mark.parametrize("part", PARTS)
def test_an_average_of_a_part_is_refused(part):
    optim = lenient(optax.chain(optax.sgd(0.1), PARTS[part]))
    make_model = lambda key: Layers(jnp.ones((2, 4)), jnp.ones(2))  # noqa: E731
    state, _ = make("data=1", "replicate", optim=optim, make_model=make_model)
    with pytest.raises(ValueError, match=r"put ema_weights outside of it, last in the ch"):
        eqxshard.ema_model(state)


@pytest.mark.parametrize(
    "rule",
    [
        eqxshard.zero1(min_size=1),
        pytest.param(eqxshard.offload(eqxshard.fsdp(min_size=1)), marks=needs_new_jax),
        pytest.param(
            eqxshard.offload(eqxshard.zero1(min_size=1, axis="fsdp")), marks=needs_new_jax
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_average_is_where_the_weights_are(rule, dtype):
    """Wherever the optimizer's state is. One program evaluates weights and average."""
    optim = lenient(optax.chain(optax.sgd(0.1), eqxshard.ema_weights(0.5)))
    precision = eqxshard.Precision(None, params=dtype)

    def loss_fn(model, batch, key):
        out = jax.vmap(eqx.nn.inference_mode(model))(batch["x"].astype(dtype))
        return jnp.sum((out.astype(jnp.float32) - batch["y"]) ** 2, axis=-1)

    state, train_step = make("data=2,fsdp=4", rule, loss_fn, optim, precision=precision)
    state, _ = train_step(state, make_batch())
    ema = arrays(state.opt_state[1].ema)

    def metric_fn(model, batch):
        return {"out": jax.vmap(model)(batch["x"].astype(dtype))}

    eval_step = eqxshard.make_eval_step(once(metric_fn))
    eval_step(state.model, make_batch())
    model = eqxshard.ema_model(state)
    # It also works for a state that is on no mesh.
    on_host = arrays(eqx.filter(eqxshard.ema_model(jax.device_get(state)), eqx.is_array))
    found = arrays(eqx.filter(model, eqx.is_inexact_array))
    for path in found:
        np.testing.assert_array_equal(found[path], on_host[path])
    assert found.keys() == ema.keys()
    for path in ema:
        np.testing.assert_array_equal(found[path], ema[path].astype(dtype))
    out = np.asarray(eval_step(model, make_batch())["out"], np.float64)
    on_one = eqx.nn.inference_mode(jax.device_put(model, jax.devices()[0]))
    plain = np.asarray(jax.vmap(on_one)(make_batch()["x"].astype(dtype)), np.float64)
    np.testing.assert_allclose(out, plain.mean(0), rtol=0.02, atol=0.02)
    # Its arrays are not those of the weights, which the step donates.
    to_average = eqxshard.make_train_step(
        lambda model, batch, key, extra: (
            loss_fn(model, batch, key) + 0 * loss_fn(extra, batch, key)
        ),
        optim,
    )
    state, metrics = to_average(state, make_batch(), model)
    assert np.isfinite(metrics.compute()["loss"])


class Normed(eqx.Module):
    last: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.last = eqx.nn.Linear(8, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch", momentum=0.0)

    def __call__(self, x, state):
        return self.norm(self.last(x), state)


@pytest.mark.slow
def test_statistics_of_inputs_are_computed_again_for_the_average():
    """The state has those of the trained weights; the docstring of `ema_model` says so."""

    def apply(model: Any, model_state: Any, x: Any) -> Any:
        axes: dict = dict(in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return jax.vmap(model, **axes)(x, model_state)

    def loss_fn(model, batch, key):
        model, model_state = model
        out, model_state = apply(model, model_state, batch["x"])
        return jnp.sum((out - batch["y"]) ** 2, axis=-1), model_state

    @eqx.filter_jit
    def observe(model, model_state, x):
        return apply(model, model_state, x)[1]

    optim = lenient(optax.chain(optax.sgd(1.0), eqxshard.ema_weights(0.9, warmup=False)))
    make_model = eqx.nn.make_with_state(Normed)
    state, train_step = make("data=8", "replicate", loss_fn, optim, make_model)
    for seed in range(3):
        state, _ = train_step(state, make_batch(seed=seed))
    averaged, x = eqxshard.ema_model(state), make_batch()["x"]
    model_state = observe(averaged, state.model_state, x)

    def metric_fn(model, batch):
        # Only the normalised features of the last layer.
        model, model_state = model
        model = eqx.tree_at(lambda m: (m.norm.weight, m.norm.bias), model, ONE_ZERO)
        return {"out": apply(model, model_state, batch["x"])[0] ** 2}

    eval_step = eqxshard.make_eval_step(metric_fn)
    found = np.asarray(eval_step((averaged, model_state), make_batch())["out"])
    np.testing.assert_allclose(found, 1, rtol=1e-3)
    stale = np.asarray(eval_step((averaged, state.model_state), make_batch())["out"])
    assert np.max(np.abs(stale - 1)) > 0.05


ONE_ZERO = (np.ones(4, np.float32), np.zeros(4, np.float32))
