"""Gradients of a batch: microbatches, and models with state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grades import graded
from helpers import (
    RULES,
    assert_close,
    make_batch,
    make_mesh,
)
from step_helpers import KEY, WEIGHTS, setup, train, without_dropout

import eqxshard

MESHES = [("data=1", "replicate"), ("data=2,fsdp=4", "fsdp")]


# Microbatches


@pytest.mark.parametrize("weight", graded(WEIGHTS, ["uneven"], ["even", "padded"]))
@pytest.mark.parametrize("mesh, rule", [("data=8", "replicate"), ("data=2,fsdp=2", "fsdp")])
def test_accumulation_is_exact_whatever_the_weights(mesh, rule, weight):
    whole, whole_step = setup(mesh, rule, loss_fn=without_dropout)
    parts, parts_step = setup(mesh, rule, loss_fn=without_dropout, accumulate=4)
    for seed in range(3):
        batch = make_batch(seed=seed, weight=WEIGHTS[weight])
        whole, whole_metrics = whole_step(whole, batch)
        parts, parts_metrics = parts_step(parts, batch)
        assert parts_metrics.compute() == pytest.approx(whole_metrics.compute(), rel=1e-5)
    assert_close(whole, parts)


# Models with state


class Normed(eqx.Module):
    # A layer before a BatchNorm needs no bias: its gradient would be noise.
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(8, 32, use_bias=False, key=k1)
        self.norm = eqx.nn.BatchNorm(32, "batch", mode="batch")
        self.last = eqx.nn.Linear(32, 4, key=k2)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.gelu(x)), state


make_normed = eqx.nn.make_with_state(Normed)


def predict(pair, x):
    model, state = pair
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return run(x, state)


def normed_errors(pair, batch, key):
    out, state = predict(pair, batch["x"])
    return jnp.sum((out - batch["y"]) ** 2, axis=-1), state


@pytest.fixture(scope="module")
def normed():
    runs = {mesh: train(make_normed, normed_errors, mesh, rule) for mesh, rule in MESHES}
    return {mesh: (losses, state) for mesh, (losses, state, _) in runs.items()}


@pytest.mark.slow
def test_batch_norm_takes_its_statistics_over_the_whole_batch(normed):
    (one, state_one), (eight, state_eight) = normed.values()
    np.testing.assert_allclose(one, eight, rtol=1e-5)
    assert_close(state_one.model_state, state_eight.model_state)
    assert_close(state_one.model, state_eight.model, rtol=1e-4)
    # By hand, after the first step.
    model, _ = make_normed(KEY)
    hidden = make_batch()["x"] @ np.asarray(model.first.weight).T
    _, state, _ = train(make_normed, normed_errors, "data=8", "replicate", steps=1)
    _, mean, variance = jax.tree.leaves(state.model_state)
    np.testing.assert_allclose(mean, 0.01 * hidden.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, 0.99 + 0.01 * hidden.var(0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_evaluation_uses_the_running_statistics(normed):
    _, state = normed["data=2,fsdp=4"]

    def metric_fn(pair, batch):
        return {"loss": jnp.sum((predict(pair, batch["x"])[0] - batch["y"]) ** 2, axis=-1)}

    eval_step = eqxshard.make_eval_step(
        metric_fn, mesh=make_mesh("data=2,fsdp=4"), rule=RULES["fsdp"]
    )
    batch = make_batch(seed=9)
    # Off centre: with the batch's own statistics the loss would be another.
    batch["x"] += 3
    pair = (state.model, state.model_state)
    found = eval_step(pair, batch).compute()["loss"]
    host = jax.tree.map(lambda x: np.asarray(x) if eqx.is_array(x) else x, pair)
    inference = eqx.nn.inference_mode(host[0])
    out = jax.vmap(lambda x: inference(x, host[1])[0], axis_name="batch")(batch["x"])
    expected = float(np.mean(np.sum((np.asarray(out) - batch["y"]) ** 2, axis=-1)))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_the_state_passes_from_one_microbatch_to_the_next():
    batch = make_batch()
    _, state, _ = train(
        make_normed,
        normed_errors,
        "data=2",
        "replicate",
        accumulate=2,
        steps=1,
        batch=batch,
    )
    model, expected = make_normed(KEY)
    # Microbatch i is every second row from row i, so no row leaves its device.
    for i in range(2):
        _, expected = predict((model, expected), batch["x"][i::2])
    assert_close(state.model_state, expected)
