"""The actions that are due after each step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..data._order import Steps
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
    - `epochs`: the epoch that each step is in; `None` if there are no epochs.
    - `evaluate_every`: the number of steps between evaluations, each of which is
        reported; `"epoch"` for one after each epoch, `None` for no evaluation.
    - `log_every`: the number of steps between reports.
    - `checkpointer`: decides when to save, if there is one.
    - `stop`: knows whether a signal asked the run to end.
    - `next_call`: from a step to the next one at which a callback is to be called; `None`
        if there is none.
    """

    last: int
    epochs: Steps | None
    evaluate_every: int | Literal["epoch"] | None
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
        epoch = self.epochs is not None and self.epochs.ends_epoch(step)
        report = ends or epoch or any(step % n == 0 for n in self._reports)
        leave = self.stop.look(step)
        save = self.checkpointer is not None and (
            leave or ends or asked or self.checkpointer.should_save(step, reporting=report)
        )
        between = self.evaluate_every
        at_interval = isinstance(between, int) and step % between == 0
        at_epoch = between == "epoch" and epoch
        evaluate = between is not None and (ends or at_interval or at_epoch)
        return Due(report or save or leave or asked, evaluate, save, leave)

    @property
    def longest_chunk(self) -> int:
        """The largest number of steps with nothing due between them."""
        epoch = [] if self.epochs is None else [self.epochs.each]
        return min([*self._intervals, *epoch])

    def steps_until_due(self, step: int) -> int:
        """The number of steps to take before anything is due."""
        called = self.next_call(step) or self.last
        epoch = self.last if self.epochs is None else self.epochs.next_end(step)
        at_intervals = (step - step % n + n for n in self._intervals)
        return min(called, self.last, epoch, *at_intervals) - step

    @property
    def _reports(self) -> list[int]:
        intervals = self.evaluate_every, self.log_every
        return [n for n in intervals if isinstance(n, int)]

    @property
    def _intervals(self) -> list[int]:
        interval = self.checkpointer and self.checkpointer.save_every
        return [*self._reports, *([interval] if interval else [])]


def evaluation_interval(
    evaluate_every: int | str, epochs: Steps | None
) -> int | Literal["epoch"]:
    """The number of steps between evaluations, or `"epoch"` for one after each epoch."""
    if evaluate_every == "epoch" and epochs is not None:
        return "epoch"
    interval = evaluate_every
    if not isinstance(interval, int | np.integer) or interval < 1:
        raise UsageError(
            f"evaluate_every={evaluate_every!r} is not a number of steps; give "
            "one, or 'epoch' and a loader with a length."
        )
    return int(interval)


def last_step(steps: int | None, epochs: int | None, of: Steps | None) -> int:
    """The step that a run ends at; `of` says which epoch each step is in."""
    if (steps is None) == (epochs is None):
        raise UsageError("fit needs one of steps= and epochs=; give exactly one.")
    if steps is not None:
        return steps
    if of is None:
        raise UsageError(
            f"epochs={epochs} needs a loader with a length, and this one has none; give "
            "fit steps= instead."
        )
    return of.end(epochs or 0)


def check_positive(**numbers: int | float | None) -> None:
    """Refuse numbers that are not positive."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise UsageError(f"{name}={value} must be positive.")
