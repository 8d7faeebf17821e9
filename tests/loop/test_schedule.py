from types import SimpleNamespace
from typing import Any

import pytest

from eqxshard import Checkpointer
from eqxshard.loop._schedule import (
    Due,
    Schedule,
    evaluation_interval,
    last_step,
    steps_per_epoch,
)


def schedule(
    first=0,
    last=10,
    epoch: int | None = 4,
    log_every=3,
    interval=None,
    stops_at=None,
    evaluate_every: int | None = 4,
    **asks,
):
    """What is due in a run that saves every `interval` steps, and is told to stop."""
    checkpointer = interval and Checkpointer("never written", save_interval_steps=interval)
    stop = SimpleNamespace(requested=lambda step: step == stops_at)
    callbacks: Any = SimpleNamespace(
        **{"want_stop": False, "want_save": False, "next_step": -1, **asks}
    )
    return Schedule(
        first, last, epoch, evaluate_every, log_every, checkpointer, stop, callbacks
    )


def steps(schedule, what, last=10):
    return [step for step in range(1, last + 1) if getattr(schedule.after(step), what)]


def test_reports_are_due_at_intervals_and_at_the_end_of_epochs():
    assert steps(schedule(), "report") == [3, 4, 6, 8, 9, 10]
    assert steps(schedule(), "evaluate") == [4, 8, 10]
    assert steps(schedule(), "save") == []


def test_an_evaluation_needs_a_report():
    assert steps(schedule(evaluate_every=5), "evaluate") == [5, 10]
    assert steps(schedule(evaluate_every=5), "report") == [3, 4, 5, 6, 8, 9, 10]


def test_a_save_needs_a_report():
    assert steps(schedule(interval=5), "save") == [5, 10]
    assert steps(schedule(interval=5), "report") == [3, 4, 5, 6, 8, 9, 10]


def test_a_signal_saves_and_leaves():
    assert schedule(interval=5, stops_at=7).after(7) == Due(
        report=True, evaluate=False, save=True, leave=True
    )
    assert schedule(stops_at=7).after(7) == Due(
        report=True, evaluate=False, save=False, leave=True
    )


def test_a_callback_saves_and_leaves():
    saves = Due(report=True, evaluate=False, save=True, leave=False)
    assert schedule(interval=100, want_save=True).after(7) == saves
    assert schedule(interval=100, want_stop=True).after(7) == saves
    assert schedule(want_stop=True).after(7).report


def test_without_an_evaluation_none_is_due_and_without_epochs_none_is_reported():
    assert steps(schedule(evaluate_every=None), "evaluate") == []
    assert steps(schedule(evaluate_every=None, epoch=None), "report") == [3, 6, 9, 10]


def chunks(schedule):
    """The numbers of steps between things that are due."""
    step, found = schedule.first, []
    while step < schedule.last:
        found.append(schedule.chunk_after(step))
        step += found[-1]
    return found


def test_chunks_end_where_something_is_due():
    assert chunks(schedule()) == [3, 1, 2, 2, 1, 1]
    assert chunks(schedule(first=2)) == [1, 1, 2, 2, 1, 1]
    assert chunks(schedule(log_every=100)) == [4, 4, 2]
    assert chunks(schedule(log_every=100, interval=5)) == [4, 1, 3, 2]
    assert chunks(schedule(log_every=100, evaluate_every=3)) == [3, 1, 2, 2, 1, 1]
    assert chunks(schedule(next_step=5))[:3] == [3, 1, 1]
    assert schedule(interval=2).longest_chunk == 2
    assert schedule(log_every=100).longest_chunk == 4


@pytest.mark.parametrize("evaluate_every", [0, -1, "epohc"])
def test_evaluations_are_some_steps_apart(evaluate_every):
    assert evaluation_interval("epoch", 4, evaluates=True) == 4
    assert evaluation_interval(7, None, evaluates=True) == 7
    assert evaluation_interval(7, 4, evaluates=False) is None
    assert evaluation_interval("epoch", None, evaluates=False) is None
    with pytest.raises(ValueError, match="must be a positive number of steps, or 'epoch'"):
        evaluation_interval(evaluate_every, 4, evaluates=False)


def test_a_loader_without_a_length_has_no_epochs():
    assert steps_per_epoch([1, 2, 3]) == 3 and steps_per_epoch(iter(())) is None
    with pytest.raises(ValueError, match="no epochs to evaluate after; give evaluate_ev"):
        evaluation_interval("epoch", None, evaluates=True)
    with pytest.raises(ValueError, match="epochs=3 needs a loader with a length, and thi"):
        last_step(None, 3, 50, 10, None)
    assert last_step(7, None, 50, 10, None) == 7


def test_a_run_ends_at_a_step_or_after_epochs():
    assert last_step(7, None, 50, 10, epoch=4) == 7
    assert last_step(None, 3, 50, 10, epoch=4) == 12
    with pytest.raises(ValueError, match="one of steps= and epochs=; give exactly one"):
        last_step(None, None, 50, 10, epoch=4)
    with pytest.raises(ValueError, match="max_nonfinite=0 must be at least 1"):
        last_step(7, None, 50, 0, epoch=4)
