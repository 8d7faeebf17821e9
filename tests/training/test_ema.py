import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, lenient, make_batch
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
