import math
import time

import pytest
from loop_helpers import fresh, make_loader

import eqxshard
from eqxshard.callbacks import EarlyStopping, TimeLimit

SCORES = [0.1, 0.9, 0.5, 0.9, 0.4, 0.95]


def fit(callback, scores, folder=None, state=None, steps=12, **options):
    """Evaluate at every second step, with these results."""
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
        and eqxshard.Checkpointer(folder, max_to_keep=1, best="eval/score", **options),
        callbacks=[callback],
    )


def test_it_stops_and_the_best_is_restored(tmp_path):
    stopping = EarlyStopping("eval/score", patience=3, mode="max")
    state = fit(stopping, SCORES, tmp_path)
    assert int(state.step) == 10
    checkpointer = eqxshard.Checkpointer(tmp_path, best="eval/score")
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
        ({"patience": 2}, [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 12),
    ],
)
def test_patience(options, scores, last):
    assert int(fit(EarlyStopping("eval/score", **options), scores).step) == last


def test_a_resumed_run_stops_where_the_uninterrupted_one_would(tmp_path):
    make = lambda: EarlyStopping("eval/score", patience=3, mode="max")  # noqa: E731
    fit(make(), SCORES, tmp_path, steps=6)
    state, _ = fresh()
    state = eqxshard.Checkpointer(tmp_path).restore(state)
    assert int(fit(make(), SCORES[3:], tmp_path, state).step) == 10


@pytest.mark.parametrize("metric", ["eval/scroe", "train/los"])
def test_a_metric_that_is_never_there_is_an_error(metric):
    with pytest.raises(
        ValueError, match=rf"waits for '{metric}', .*; use .*eval/score\.\n"
    ):
        fit(EarlyStopping(metric, patience=3), SCORES)


@pytest.mark.parametrize("options", [{"patience": 0}, {"min_delta": -1}, {"mode": "best"}])
def test_options_of_early_stopping_make_sense(options, unannotated):
    with pytest.raises(ValueError, match="must be at least 1, min_delta"):
        EarlyStopping("eval/score", **{"patience": 1, **options})


def test_a_time_limit_ends_a_run(tmp_path, monkeypatch, capfd):
    limit = TimeLimit("1:00:00")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + now[0])
    now = [0.0]

    def evaluate(model):
        now[0] += 1_800
        return {}

    state, train_step = fresh()
    state = eqxshard.fit(
        state,
        train_step,
        make_loader(),
        steps=60,
        evaluate=evaluate,
        evaluate_every=2,
        callbacks=[limit],
        stall_seconds=None,
    )
    assert int(state.step) == 4
    assert "the time limit of 1:00:00 is reached; not saved" in capfd.readouterr().err


@pytest.mark.parametrize("limit, seconds", [(90.0, 90), ("1:30:00", 5_400), ("02:05", 125)])
def test_time_limits_are_seconds_or_written_as_hours(limit, seconds):
    before = time.monotonic()
    assert 0 <= TimeLimit(limit)._end - seconds - before < 60


@pytest.mark.parametrize("limit", [0.0, -1.0, "", "1h", "0:00", math.nan])
def test_other_limits_are_refused(limit):
    with pytest.raises(ValueError, match="is not a time limit; give a positive number"):
        TimeLimit(limit)
