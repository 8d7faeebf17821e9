from types import SimpleNamespace

import pytest

from eqxshard import Checkpointer
from eqxshard.loop._schedule import Due, Schedule, evaluation_interval, last_step


def schedule(
    first=0, last=10, epoch=4, log_every=3, interval=None, stops_at=None, evaluate_every=4
):
    """What is due in a run that saves every `interval` steps, and is told to stop."""
    checkpointer = interval and Checkpointer("never written", save_interval_steps=interval)
    stop = SimpleNamespace(requested=lambda step: step == stops_at)
    return Schedule(first, last, epoch, evaluate_every, log_every, checkpointer, stop)


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
        report=False, evaluate=False, save=False, leave=True
    )


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
    assert schedule(interval=2).longest_chunk == 2
    assert schedule(log_every=100).longest_chunk == 4


@pytest.mark.parametrize("evaluate_every", [0, -1, "epohc"])
def test_evaluations_are_some_steps_apart(evaluate_every):
    assert evaluation_interval("epoch", 4) == 4 and evaluation_interval(7, 4) == 7
    with pytest.raises(ValueError, match="must be a positive number of steps, or 'epoch'"):
        evaluation_interval(evaluate_every, 4)


def test_a_run_ends_at_a_step_or_after_epochs():
    assert last_step(7, None, 50, 10, epoch=4) == 7
    assert last_step(None, 3, 50, 10, epoch=4) == 12
    with pytest.raises(ValueError, match="one of steps= and epochs=; give exactly one"):
        last_step(None, None, 50, 10, epoch=4)
    with pytest.raises(ValueError, match="max_nonfinite=0 must be at least 1"):
        last_step(7, None, 50, 0, epoch=4)
