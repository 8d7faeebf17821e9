"""The actions that are due after each step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..checkpoint._checkpointer import Checkpointer
from ._signals import Stop


class Due(NamedTuple):
    """The actions that are due after a step.

    - `report`: log the metrics since the last report.
    - `evaluate`: evaluate the model.
    - `save`: save a checkpoint.
    - `leave`: end the run, because a signal asked for it.
    """

    report: bool
    evaluate: bool
    save: bool
    leave: bool


@dataclass(frozen=True)
class Schedule:
    """Decides which actions are due after each step of a run.

    - `last`: the step that the run ends at.
    - `epoch`: the number of steps in an epoch; `None` if there are no epochs.
    - `evaluate_every`: the number of steps between evaluations, each of which is
        reported; `None` for no evaluation.
    - `log_every`: the number of steps between reports.
    - `checkpointer`: decides when to save, if there is one.
    - `stop`: knows whether a signal asked the run to end.
    - `next_call`: the next step after a step that a callback is to be called at.
    """

    last: int
    epoch: int | None
    evaluate_every: int | None
    log_every: int
    checkpointer: Checkpointer | None
    stop: Stop
    next_call: Callable[[int], int | None]

    def after(self, step: int, *, asked: bool) -> Due:
        """The actions due after a step. Several processes must ask about the same steps.

        **Arguments:**

        - `step`: the number of steps taken.
        - `asked`: whether a callback asked to save or to stop.
        """
        ends = step == self.last
        report = ends or any(step % interval == 0 for interval in self._reports)
        leave = self.stop.look(step)
        save = self.checkpointer is not None and (
            leave or ends or asked or self.checkpointer.should_save(step, reporting=report)
        )
        between = self.evaluate_every
        evaluate = between is not None and (ends or step % between == 0)
        return Due(report or save or leave or asked, evaluate, save, leave)

    @property
    def longest_chunk(self) -> int:
        """The largest number of steps with nothing due between them."""
        return min(self._intervals)

    def steps_until_due(self, step: int) -> int:
        """The number of steps to take before anything is due."""
        called = self.next_call(step) or self.last
        due = min(called, self.last, *(step - step % n + n for n in self._intervals))
        return due - step

    @property
    def _reports(self) -> list[int]:
        intervals = self.epoch, self.evaluate_every, self.log_every
        return [n for n in intervals if n is not None]

    @property
    def _intervals(self) -> list[int]:
        interval = self.checkpointer and self.checkpointer.save_every
        return [*self._reports, *([interval] if interval else [])]


def evaluation_interval(evaluate_every: int | str, epoch: int | None) -> int:
    """The number of steps between evaluations."""
    interval = epoch if evaluate_every == "epoch" else evaluate_every
    if not isinstance(interval, int | np.integer) or interval < 1:
        raise ValueError(
            f"evaluate_every={evaluate_every!r} is not a number of steps; give "
            "one, or 'epoch' and a loader with a length."
        )
    return int(interval)


def last_step(steps: int | None, epochs: int | None, epoch: int | None) -> int:
    """The step that a run ends at."""
    if (steps is None) == (epochs is None):
        raise ValueError("fit needs one of steps= and epochs=; give exactly one.")
    if steps is not None:
        return steps
    if epoch is None:
        raise ValueError(
            f"epochs={epochs} needs a loader with a length, and this one has none; give "
            "fit steps= instead."
        )
    return (epochs or 0) * epoch


def check_positive(**numbers: int | float | None) -> None:
    """Refuse numbers that are not positive."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value} must be positive.")
