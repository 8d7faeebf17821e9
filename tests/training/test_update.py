"""Updates: frozen parameters, ZeRO, clipping, types."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    RULES,
    Model,
    assert_close,
    assert_equal,
    compiles,
    lenient,
    make_batch,
    part,
    squared_errors,
)
from jax.sharding import PartitionSpec as P
from step_helpers import KEY, Wide, make, train, without_dropout

import eqxshard
from eqxshard.testing import collectives

MESHES = [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")]


# Frozen parameters


def only_last(make_model=Model):
    """A filter spec: the last layer is trained."""
    model = eqx.filter_eval_shape(make_model, KEY)
    frozen = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(lambda model: model.last, frozen, replace=True)


@pytest.mark.parametrize("mesh, rule", MESHES)
def test_frozen_arrays_do_not_change_and_have_no_optimizer_state(mesh, rule):
    options: dict = {"trainable": only_last()}
    fresh = train(Model, squared_errors, mesh, rule, steps=0, **options)[1].model
    _, state, _ = train(Model, squared_errors, mesh, rule, **options)
    assert_equal(state.model.first, fresh.first)
    for new, old in zip(jax.tree.leaves(state.model.last), jax.tree.leaves(fresh.last)):
        assert np.all(np.asarray(new) != np.asarray(old))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert sorted(leaf.shape for leaf in moments) == [(4,), (4,), (4, 32), (4, 32)]


# Gradients and optimizer state that are split unlike the parameters


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate": 4}])
def test_zero1_trains_as_one_device_does(options):
    given: dict = dict(steps=5, **options)
    one, state_one, _ = train(Model, squared_errors, "data=1", "replicate", **given)
    rule = eqxshard.zero1(min_size=1)
    many, state, train_step = train(Model, squared_errors, "data=8", rule, **given)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert_close(state.model, state_one.model)
    assert state.model.first.weight.sharding.spec == P()
    moments = state.opt_state[0]
    assert part(moments.mu.first.weight) == part(moments.nu.first.weight) == (4, 8)
    # The updated parts are gathered, and nothing else; the last bias has only 4 elements.
    assert collectives(train_step, state, make_batch()).counts["all-gather"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [RULES["fsdp"], eqxshard.zero1(min_size=1, axis=("data", "fsdp"))]
)
def test_clipping_uses_the_norm_of_the_whole_gradient(rule):
    optim = lenient(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)))
    one = train(Model, squared_errors, "data=1", "replicate", optim=optim)
    many = train(Model, squared_errors, "data=2,fsdp=4", rule, optim=optim)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    assert_close(many[1].model, one[1].model)
    # It did clip.
    _, state, _ = train(Model, squared_errors, "data=2,fsdp=4", rule, optim=optim, steps=1)
    change = jax.tree.map(
        lambda new, old: np.asarray(new) - np.asarray(old),
        *(eqx.filter(model, eqx.is_inexact_array) for model in (state.model, Model(KEY))),
    )
    assert float(optax.tree.norm(change)) == pytest.approx(0.05, rel=1e-4)


# Optimizers


def test_parameters_keep_their_type():
    """Whatever type an optimizer's updates are of."""
    optim = lenient(optax.adam(1e-2, mu_dtype=jnp.float32))

    def make_model(key):
        return Wide(jax.random.normal(key, (8, 8), jnp.bfloat16))

    def loss_fn(model, batch, key):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch)
        return squared_errors(model, half, key)

    for nonfinite in ("skip", "ignore"):
        options = {"make_model": make_model, "nonfinite": nonfinite}
        state, train_step = make("data=8", "replicate", loss_fn, optim, **options)
        with jax.numpy_dtype_promotion("standard"), compiles("train_step") as events:
            state, metrics = train_step(state, make_batch())
            for seed in range(2):
                state, metrics = train_step(state, make_batch(seed=seed))
        assert state.model.weight.dtype == jnp.bfloat16
        assert metrics.totals["loss"].dtype == jnp.float32
        assert len(events) == 3


def test_an_optimizer_may_ask_for_the_loss():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    optim = optax.chain(optax.sgd(0.0), plateau)
    with jax.numpy_dtype_promotion("standard"):
        state, train_step = make("data=8", "replicate", without_dropout, optim)
        state, metrics = train_step(state, make_batch())
        for _ in range(3):
            state, _ = train_step(state, make_batch())
    assert state.opt_state[1].best_value == pytest.approx(metrics.compute()["loss"])
    assert state.opt_state[1].scale < 1
