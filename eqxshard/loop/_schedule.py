"""The actions that are due after each step."""

from collections.abc import Sized
from typing import Any, NamedTuple

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


class Schedule:
    """Decides which actions are due after each step of a run.

    **Arguments:**

    - `last`: the step that the run ends at.
    - `epoch`: the number of steps in an epoch; `None` if there are no epochs.
    - `evaluate_every`: the number of steps between evaluations, each of which is
        reported; `None` for no evaluation.
    - `log_every`: the number of steps between reports.
    - `checkpointer`: decides when to save, if there is one.
    - `stop`: knows whether a signal asked the run to end.
    """

    def __init__(
        self,
        last: int,
        epoch: int | None,
        evaluate_every: int | None,
        log_every: int,
        checkpointer: Checkpointer | None,
        stop: Stop,
    ):
        self.last = last
        self._evaluate_every = evaluate_every
        self._reports = [n for n in (epoch, evaluate_every, log_every) if n is not None]
        self._checkpointer = checkpointer
        self._stop = stop

    def after(self, step: int, *, asked: bool) -> Due:
        """The actions due after a step. Several processes must ask about the same steps.

        **Arguments:**

        - `step`: the number of steps taken.
        - `asked`: whether a callback asked to save or to stop.
        """
        ends = step == self.last
        report = ends or any(step % interval == 0 for interval in self._reports)
        leave = self._stop.requested(step)
        save = self._checkpointer is not None and (
            leave or ends or asked or self._checkpointer.should_save(step, reporting=report)
        )
        between = self._evaluate_every
        evaluate = between is not None and (ends or step % between == 0)
        return Due(report or save or leave or asked, evaluate, save, leave)

    @property
    def longest_chunk(self) -> int:
        """The largest number of steps with nothing due between them."""
        return min(self._intervals())

    def steps_until_due(self, step: int) -> int:
        """The number of steps to take before anything is due."""
        return min(self.last - step, *(n - step % n for n in self._intervals()))

    def _intervals(self) -> list[int]:
        interval = self._checkpointer and self._checkpointer.save_every
        return [*self._reports, *([interval] if interval else [])]


def steps_per_epoch(loader: Any) -> int | None:
    """The number of steps in an epoch of a loader; `None` if it has no epochs."""
    return len(loader) if isinstance(loader, Sized) else None


def evaluation_interval(
    evaluate_every: int | str, epoch: int | None, *, evaluates: bool
) -> int | None:
    """The number of steps between evaluations; `None` if there are none."""
    if evaluate_every == "epoch":
        if epoch is None and evaluates:
            raise ValueError(
                "this loader has no length, so there are no epochs to evaluate after; give "
                "evaluate_every a number of steps."
            )
        return epoch if evaluates else None
    if not isinstance(evaluate_every, int | np.integer) or evaluate_every < 1:
        raise ValueError(
            f"evaluate_every={evaluate_every!r} must be a positive number of steps, or "
            "'epoch'."
        )
    return evaluate_every if evaluates else None


def last_step(
    steps: int | None,
    epochs: int | None,
    log_every: int,
    max_nonfinite: int,
    epoch: int | None,
) -> int:
    """The step that a run ends at; raise `ValueError` unless the numbers make sense."""
    if (steps is None) == (epochs is None):
        raise ValueError("fit needs one of steps= and epochs=; give exactly one.")
    numbers = {"steps": steps, "epochs": epochs, "log_every": log_every}
    for name, value in (numbers | {"max_nonfinite": max_nonfinite}).items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if steps is not None:
        return steps
    if epoch is None:
        raise ValueError(
            f"epochs={epochs} needs a loader with a length, and this one has none; give "
            "fit steps= instead."
        )
    return (epochs or 0) * epoch
