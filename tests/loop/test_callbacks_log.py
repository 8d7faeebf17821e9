import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, make_mesh
from loop_helpers import Layers, Recorder, fresh, loss_fn, make_loader

import eqxshard
from eqxshard.callbacks import EarlyStopping, EvaluateEMA, LearningRate, Throughput

WHERE: dict = {"mesh": make_mesh(), "rule": eqxshard.replicate()}


def evaluate(model):
    return {"bias": float(model.layers[2].bias[0])}


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
#: Of the steps 2, 4 and 6; the first step has number 0.
RATES = [0.09, 0.07, 0.05]


def test_averaged_weights_are_evaluated_and_the_learning_rate_is_read():
    kept = optax.inject_hyperparams(optax.sgd)(SCHEDULE)
    optim = lenient(optax.chain(kept, eqxshard.ema_weights(0.9)))
    state = eqxshard.init_state(Layers, optim, key=jax.random.key(0), **WHERE)
    train_step = eqxshard.make_train_step(loss_fn, optim, **WHERE)
    recorder = Recorder()

    # Early stopping sees what callbacks before it, or after it, log.
    stopping = EarlyStopping("ema/bias", patience=10)
    state = eqxshard.fit(
        state,
        train_step,
        make_loader(),
        steps=6,
        log_every=2,
        evaluate=evaluate,
        evaluate_every=4,
        trackers=[recorder],
        callbacks=[stopping, EvaluateEMA(evaluate), LearningRate()],
    )
    lines = [values for _, values in recorder.lines]
    found = [line.get("ema/bias") for line in lines]
    assert found[0] is None and found[1] != lines[1]["eval/bias"]
    assert found[2] == evaluate(eqxshard.ema_model(state))["bias"]
    rates = [line["learning_rate"] for line in lines]
    np.testing.assert_allclose(rates, RATES, rtol=1e-5)


def fit(*callbacks):
    state, train_step = fresh()
    recorder = Recorder()
    options: dict = {"log_every": 2, "trackers": [recorder], "callbacks": callbacks}
    eqxshard.fit(state, train_step, make_loader(), steps=6, **options)
    return [values for _, values in recorder.lines]


def test_the_learning_rate_of_a_schedule_is_reported():
    rates = [line["learning_rate"] for line in fit(LearningRate(SCHEDULE))]
    np.testing.assert_allclose(rates, RATES, rtol=1e-5)
    with pytest.raises(ValueError, match="does not keep its learning rate; give Learning"):
        fit(LearningRate())


def test_learning_rates_of_several_models_are_told_apart():
    states = {
        name: eqxshard.TrainState(
            jnp.int32(0),
            None,
            optax.inject_hyperparams(optax.sgd)(rate).init({}),
            jax.random.key(0),
        )
        for name, rate in {"g": 0.5, "d": 0.25}.items()
    }

    def train_step(states, batch):
        count = lambda s: eqx.tree_at(lambda s: s.step, s, s.step + 1)  # noqa: E731
        one = jnp.float32(1)
        metrics = eqxshard.Metrics({"loss": one}, one, jnp.int32(0))
        return {name: count(state) for name, state in states.items()}, metrics

    recorder = Recorder()
    options: dict = {"callbacks": [LearningRate()], "trackers": [recorder]}
    eqxshard.fit(states, train_step, make_loader(), steps=1, **options)
    ((_, values),) = recorder.lines
    rates = {k: v for k, v in values.items() if k.startswith("learning_rate")}
    assert rates == {"learning_rate/g": 0.5, "learning_rate/d": 0.25}


def test_throughput_is_reported_with_the_part_of_the_peak_that_is_used():
    lines = fit(Throughput(10, 3.0, peak=100.0))
    assert len(lines) == 3
    for line in lines:
        tokens = 10 * line["train/examples_per_second"]
        assert line["tokens_per_second"] == pytest.approx(tokens)
        # 8 devices.
        assert line["mfu"] == pytest.approx(tokens * 3 / 800)


def test_the_peak_is_that_of_the_devices_if_it_is_known(monkeypatch):
    line = fit(Throughput(10, 3.0))[0]
    assert "tokens_per_second" in line and "mfu" not in line
    monkeypatch.setattr("eqxshard.sharding._peaks.peak_flops", lambda *device: 1e3)
    line = fit(Throughput(10, 3.0))[0]
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 3 / 8e3)


def test_throughput_needs_positive_numbers():
    with pytest.raises(ValueError, match=r"needs positive numbers, and got -1\.0"):
        Throughput(10, flops_per_token=-1.0)
