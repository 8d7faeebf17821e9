import math
import time

import jax
import numpy as np
import optax
import pytest
from helpers import lenient, make_mesh
from loop_helpers import Layers, Recorder, fresh, loss_fn, make_loader

import eqxshard
from eqxshard.callbacks import (
    EarlyStopping,
    EvaluateEMA,
    Every,
    LearningRate,
    Profile,
    Throughput,
    TimeLimit,
)

WHERE: dict = {"mesh": make_mesh(), "rule": eqxshard.replicate()}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
SCORES = [0.1, 0.9, 0.5, 0.9, 0.4, 0.95]


def fit(*callbacks, steps=6, placement="host", **options):
    """The reports of a run."""
    state, train_step = fresh()
    recorder = Recorder()
    options = {"log_every": 2, "trackers": [recorder], "callbacks": callbacks, **options}
    loader = make_loader(placement=placement)
    eqxshard.fit(state, train_step, loader, steps=steps, **options)
    return [values for _, values in recorder.lines]


@pytest.mark.parametrize("is_given", [True, False])
def test_averaged_weights_are_evaluated(is_given):
    def evaluate(model):
        return {"bias": float(model.layers[2].bias[0])}

    own = evaluate if is_given else None

    optim = lenient(optax.chain(optax.sgd(0.1), eqxshard.ema_weights(0.9)))
    state = eqxshard.init_state(Layers, optim, key=jax.random.key(0), **WHERE)
    train_step = eqxshard.make_train_step(loss_fn, optim, **WHERE)
    recorder = Recorder()
    state = eqxshard.fit(
        state,
        train_step,
        make_loader(),
        steps=6,
        log_every=2,
        evaluate=evaluate,
        evaluate_every=4,
        trackers=[recorder],
        # Sees what callbacks after it log, too.
        callbacks=[EarlyStopping("ema/bias", 10, mode="min"), EvaluateEMA(own)],
    )
    lines = [values for _, values in recorder.lines]
    found = [line.get("ema/bias") for line in lines]
    assert found[0] is None and found[1] != lines[1]["eval/bias"]
    assert found[2] == evaluate(eqxshard.ema_model(state))["bias"]
    with pytest.raises(ValueError, match="does not average the weights"):
        fit(EvaluateEMA(own), evaluate=evaluate)
    with pytest.raises(ValueError, match="of the run, which has none; give fit evaluate="):
        fit(EvaluateEMA(own))


def test_the_learning_rate_of_a_schedule_is_reported():
    rates = [line["learning_rate"] for line in fit(LearningRate(SCHEDULE))]
    # Of the steps 2, 4 and 6; the first step has number 0.
    np.testing.assert_allclose(rates, [0.09, 0.07, 0.05], rtol=1e-5)


def test_throughput_is_reported_with_the_part_of_the_peak_that_is_used(monkeypatch):
    lines = fit(Throughput(10, 3.0, peak=100.0))
    assert len(lines) == 3
    for line in lines:
        tokens = 10 * line["train/examples_per_second"]
        assert line["tokens_per_second"] == pytest.approx(tokens)
        # 8 devices.
        assert line["mfu"] == pytest.approx(tokens * 3 / 800)
    assert "mfu" not in fit(Throughput(10, 3.0))[0]
    monkeypatch.setattr("eqxshard.sharding._peaks.peak_flops", lambda *device: 1e3)
    line = fit(Throughput(10, 3.0))[0]
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 3 / 8e3)


def test_a_function_is_called_every_some_steps():
    seen = []
    fit(
        Every(2, lambda loop: seen.append(loop.step)),
        Every(3, lambda loop: seen.append(-3)),
    )
    assert seen == [2, -3, 4, 6, -3]


# Profiles


@pytest.mark.slow
def test_a_profile_is_written(tmp_path):
    # The second one ends with the run.
    for last in (4, 100):
        fit(Profile(3, last, tmp_path / str(last)))
        assert [*(tmp_path / str(last)).rglob("*.xplane.pb")]


# Early stopping


def stopped(callback, scores, folder=None, state=None, steps=12):
    """The state after a run that evaluates at every second step, with these results."""
    scores = iter(scores)
    start, train_step = fresh()
    return eqxshard.fit(
        start if state is None else state,
        train_step,
        make_loader(),
        steps=steps,
        evaluate=lambda model: {"score": next(scores)},
        evaluate_every=2,
        checkpointer=folder
        and eqxshard.Checkpointer(folder, max_to_keep=1, best="eval/score", mode="max"),
        callbacks=[callback],
    )


def test_it_stops_and_the_best_is_restored(tmp_path):
    stopping = EarlyStopping("eval/score", patience=3, mode="max")
    state = stopped(stopping, SCORES, tmp_path)
    assert int(state.step) == 10
    checkpointer = eqxshard.Checkpointer(tmp_path, best="eval/score", mode="max")
    assert checkpointer.steps() == [4, 10] and checkpointer.best_step() == 4
    best = checkpointer.restore(state, step=checkpointer.best_step())
    assert int(best.step) == 4


@pytest.mark.parametrize(
    "options, scores, last",
    [
        ({"patience": 2}, [0.5, 0.4, 0.45, 0.41, 0.1], 8),
        ({"patience": 1, "mode": "max"}, [0.5, 0.6, 0.6, 0.9], 6),
        ({"patience": 1, "mode": "max", "min_delta": 0.2}, [0.5, 0.75, 0.9, 0.9], 6),
        ({"patience": 2}, [math.nan, 0.5, math.nan, math.nan, 0.1], 8),
        ({"patience": 2}, [math.inf, 0.5, -math.inf, 0.6, 0.1], 8),
        ({"patience": 2}, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 12),
    ],
)
def test_patience(options, scores, last):
    stopping = EarlyStopping("eval/score", **{"mode": "min"} | options)
    assert int(stopped(stopping, scores).step) == last


def test_a_metric_that_was_never_finite_is_said_to_be_so(capfd):
    scores = [math.nan, math.inf, math.nan]
    assert int(stopped(EarlyStopping("eval/score", 3, mode="max"), scores).step) == 6
    assert "step 6: eval/score was not finite in 3 reports;" in capfd.readouterr().err
    said = EarlyStopping("eval/score", 3, mode="max").ended({"best": None, "waited": 3})
    assert said is not None and said.startswith("eval/score was not finite in 3 reports (")


def test_a_resumed_run_stops_where_the_uninterrupted_one_would(tmp_path):
    make = lambda: EarlyStopping("eval/score", patience=3, mode="max")  # noqa: E731
    stopped(make(), SCORES, tmp_path, steps=6)
    state, _ = fresh()
    state = eqxshard.Checkpointer(tmp_path).restore(state)
    assert int(stopped(make(), SCORES[3:], tmp_path, state).step) == 10


def test_a_run_that_it_has_stopped_does_not_go_on_without_more_patience(tmp_path, capfd):
    def again(patience, scores):
        state = eqxshard.Checkpointer(tmp_path).restore(fresh()[0])
        callback = EarlyStopping("eval/score", patience, mode="min")
        return int(stopped(callback, scores, tmp_path, state).step)

    assert (
        int(stopped(EarlyStopping("eval/score", 1, mode="min"), [1, 2], tmp_path).step) == 4
    )
    capfd.readouterr()
    assert again(1, []) == again(1, []) == 4
    assert (
        "the run has ended at step 4: eval/score had not improved on 1.0 in 1 report "
        "(with a larger patience= it would go on); nothing is left to do."
    ) in capfd.readouterr().err.splitlines()
    assert again(3, [2, 2, 0]) == 8
    # A limit of time only interrupts a run.
    assert TimeLimit(1.0).ended({}) is None


def test_a_time_limit_ends_a_run(monkeypatch, capfd):
    limit, clock, now = TimeLimit("1:00:00"), time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + now[0])

    def evaluate(model):
        now[0] += 1_800
        return {}

    options: dict = {"evaluate": evaluate, "evaluate_every": 2}
    assert fit(limit, steps=60, **options)[-1]["epoch"] == 4 / 6
    assert "the time limit of 1:00:00 is reached; not saved" in capfd.readouterr().err


# Refusals

MISTAKES = {
    "metric": (
        lambda: stopped(EarlyStopping("eval/scroe", 3, mode="min"), SCORES),
        "eval/scroe",
    ),
    "patience": (lambda: EarlyStopping("eval/score", 0), "patience=0"),
    "min_delta": (lambda: EarlyStopping("eval/score", 1, min_delta=-1), "min_delta=-1"),
    "no mode": (lambda: EarlyStopping("eval/score", 1), "; say mode='min' or mode='max'"),
    "mode": (lambda: EarlyStopping("eval/score", 1, mode="best"), "'best'"),  # pyright: ignore
    "limit": (lambda: TimeLimit("1h"), "'1h' is not a time limit"),
    "no time": (lambda: TimeLimit(0.0), "0.0 is not a time limit"),
    "steps": (lambda: Profile(5, 4, "profile"), "5:4"),
    "first": (lambda: Profile(1, 4, "profile"), "1:4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake, unannotated):
    call, word = MISTAKES[mistake]
    with pytest.raises(ValueError, match=rf"{word}"):
        call()
