import pytest

from eqxshard import Checkpointer
from eqxshard.data._order import Steps
from eqxshard.loop._due import Due, Schedule
from eqxshard.loop._signals import Stop


def schedule(
    epoch: int | None = 4,
    evaluate_every: int | None = 4,
    log_every=3,
    interval=None,
    stop=None,
):
    """The work that is due in a run of 10 steps, with a save every `interval` steps."""
    checkpointer = interval and Checkpointer("never written", save_every=interval)
    stop = stop or Stop(False)
    calls = lambda step: None  # noqa: E731
    epochs = None if epoch is None else Steps(1, epoch)
    return Schedule(10, epochs, evaluate_every, log_every, checkpointer, stop, calls)


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
@pytest.mark.parametrize("leaves", [True, False])
def test_who_asks_for_an_end_gets_a_checkpoint(interval, leaves):
    """A signal, or a callback."""
    stop = Stop(True)
    stop.requested = leaves
    due = schedule(interval=interval, stop=stop).after(7, asked=not leaves)
    assert due == Due(report=True, evaluate=False, save=interval is not None, leave=leaves)


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
