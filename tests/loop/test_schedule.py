import signal

import pytest

from eqxshard import Checkpointer
from eqxshard.loop._schedule import (
    Due,
    Schedule,
    evaluation_interval,
    last_step,
    steps_per_epoch,
)
from eqxshard.loop._signals import Stop


def schedule(
    epoch: int | None = 4,
    evaluate_every: int | None = 4,
    log_every=3,
    interval=None,
    stop=None,
):
    """What is due in a run of 10 steps that saves every `interval` steps."""
    checkpointer = interval and Checkpointer("never written", save_every=interval)
    return Schedule(10, epoch, evaluate_every, log_every, checkpointer, stop or Stop(False))


def steps(schedule, what):
    due = {step: schedule.after(step, asked=False) for step in range(1, 11)}
    return [step for step, each in due.items() if getattr(each, what)]


@pytest.mark.parametrize(
    "options, evaluations, saves, reports",
    [
        ({}, [4, 8, 10], [], [3, 4, 6, 8, 9, 10]),
        # Evaluations and saves need reports.
        ({"evaluate_every": 5}, [5, 10], [], [3, 4, 5, 6, 8, 9, 10]),
        ({"interval": 5}, [4, 8, 10], [5, 10], [3, 4, 5, 6, 8, 9, 10]),
        ({"evaluate_every": None, "epoch": None}, [], [], [3, 6, 9, 10]),
    ],
)
def test_actions_are_due_at_intervals_and_at_the_end(options, evaluations, saves, reports):
    made = schedule(**options)
    assert steps(made, "evaluate") == evaluations
    assert steps(made, "save") == saves
    assert steps(made, "report") == reports
    assert steps(made, "leave") == []


@pytest.mark.parametrize("interval", [None, 100])
def test_a_signal_saves_and_leaves(interval):
    stop = Stop(True)
    stop.signal = signal.SIGTERM
    due = schedule(interval=interval, stop=stop).after(7, asked=False)
    assert due == Due(report=True, evaluate=False, save=interval is not None, leave=True)


@pytest.mark.parametrize("interval", [None, 100])
def test_a_callback_that_asks_saves(interval):
    due = schedule(interval=interval).after(7, asked=True)
    assert due == Due(report=True, evaluate=False, save=interval is not None, leave=False)


@pytest.mark.parametrize(
    "options, first, expected, longest",
    [
        ({}, 0, [3, 1, 2, 2, 1, 1], 3),
        ({}, 2, [1, 1, 2, 2, 1, 1], 3),
        ({"log_every": 100}, 0, [4, 4, 2], 4),
        ({"log_every": 100, "interval": 5}, 0, [4, 1, 3, 2], 4),
        ({"log_every": 100, "evaluate_every": 3}, 0, [3, 1, 2, 2, 1, 1], 3),
    ],
)
def test_chunks_end_where_something_is_due(options, first, expected, longest):
    made, step, found = schedule(**options), first, []
    while step < 10:
        found.append(made.steps_until_due(step))
        step += found[-1]
    assert found == expected and made.longest_chunk == longest


def test_evaluations_are_some_steps_apart():
    assert evaluation_interval("epoch", 4, evaluates=True) == 4
    assert evaluation_interval(7, None, evaluates=True) == 7
    assert evaluation_interval(7, 4, evaluates=False) is None
    assert evaluation_interval("epoch", None, evaluates=False) is None


def test_a_run_ends_at_a_step_or_after_epochs():
    assert last_step(7, None, 50, 10, epoch=None) == 7
    assert last_step(None, 3, 50, 10, epoch=4) == 12
    assert steps_per_epoch([1, 2, 3]) == 3 and steps_per_epoch(iter(())) is None
