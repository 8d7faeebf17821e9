"""The actions that are due after each step."""

from typing import Any, NamedTuple

from ..checkpoint._checkpointer import Checkpointer


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

    - `first`, `last`: the step that the run starts from, and the one that it ends at.
    - `epoch`: the number of steps in an epoch.
    - `evaluate_every`: the number of steps between evaluations, each of which is
        reported.
    - `log_every`: the number of steps between reports.
    - `checkpointer`: decides when to save, if there is one.
    - `stop`: knows whether a signal asked the run to end.
    """

    def __init__(
        self,
        first: int,
        last: int,
        epoch: int,
        evaluate_every: int,
        log_every: int,
        checkpointer: Checkpointer | None,
        stop: Any,
    ):
        self.first = first
        self.last = last
        self._periods = (epoch, evaluate_every, log_every)
        self._evaluate_every = evaluate_every
        self._checkpointer = checkpointer
        self._stop = stop

    def after(self, step: int) -> Due:
        """The actions due after a step. Several processes must ask about the same steps."""
        ends = step == self.last
        report = ends or any(step % period == 0 for period in self._periods)
        leave = self._stop.requested(step)
        save = self._checkpointer is not None and (
            leave
            or step == self.last
            or self._checkpointer.should_save(step, reporting=report)
        )
        evaluate = ends or step % self._evaluate_every == 0
        return Due(report=report or save, evaluate=evaluate, save=save, leave=leave)

    @property
    def longest_chunk(self) -> int:
        """The largest number of steps with nothing due between them."""
        return min(self._all_periods())

    def chunk_after(self, step: int) -> int:
        """The number of steps to take before anything is due."""
        return min(self.last - step, *(n - step % n for n in self._all_periods()))

    def _all_periods(self) -> list[int]:
        interval = self._checkpointer and self._checkpointer.save_interval_steps
        return [*self._periods, *([interval] if interval else [])]


def evaluation_interval(evaluate_every: int | str, epoch: int) -> int:
    """The number of steps between evaluations."""
    if evaluate_every == "epoch":
        return epoch
    if not isinstance(evaluate_every, int) or evaluate_every < 1:
        raise ValueError(
            f"evaluate_every={evaluate_every!r} must be a positive number of steps, or "
            "'epoch'."
        )
    return evaluate_every


def last_step(
    steps: int | None, epochs: int | None, log_every: int, max_nonfinite: int, epoch: int
) -> int:
    """The step that a run ends at; raise `ValueError` unless the numbers make sense."""
    if (steps is None) == (epochs is None):
        raise ValueError("fit needs one of steps= and epochs=; give exactly one.")
    numbers = {"steps": steps, "epochs": epochs, "log_every": log_every}
    for name, value in (numbers | {"max_nonfinite": max_nonfinite}).items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    return steps if steps is not None else (epochs or 0) * epoch
