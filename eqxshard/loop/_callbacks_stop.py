"""Callbacks that end a run."""

import math
import operator
import time
from collections.abc import Mapping
from typing import Any, Literal

from ._callbacks import Callback
from ._loop import Loop


class EarlyStopping(Callback):
    """Stop when a metric has not improved for some evaluations.

    The state is saved before the run ends, if there is a checkpointer. It is the last
    state, not the best one: with `Checkpointer(..., best=metric)`, that is in the
    checkpoint of [`eqxshard.Checkpointer.best_step`][]. The count is saved in every
    checkpoint, so a resumed run stops where the uninterrupted one would have.

    **Arguments:**

    - `metric`: its name in reports, such as `"eval/loss"`.
    - `patience`: stop after this many reports of the metric in a row without improvement.
    - `min_delta`: a smaller improvement does not count.
    - `mode`: whether the best value is the smallest (`"min"`) or the largest (`"max"`).

    **Raises:**

    `ValueError` if `patience` is less than 1, `min_delta` is negative or `mode` is not
    known; during the run, if an evaluation, or others of its kind, such as
    `train/`, are reported without the metric.

    !!! Example

        ```python
        state = eqxshard.fit(
            state,
            train_step,
            loader,
            epochs=100,
            evaluate=evaluate,
            checkpointer=eqxshard.Checkpointer("run", best="eval/loss", mode="min"),
            callbacks=[eqxshard.callbacks.EarlyStopping("eval/loss", patience=5)],
        )
        ```
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        *,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ):
        if patience < 1 or min_delta < 0 or mode not in ("min", "max"):
            raise ValueError(
                f"patience={patience} must be at least 1, min_delta={min_delta} at least 0 "
                f"and mode={mode!r} 'min' or 'max'."
            )
        self.metric = metric
        self._patience = operator.index(patience)
        self._min_delta = min_delta
        self._sign = 1.0 if mode == "max" else -1.0
        self._best: float | None = None
        self._waited = 0

    def after_report(self, loop: Loop) -> None:
        """Compare the metric with its best value."""
        if self.metric not in loop.values:
            kind = self.metric.partition("/")[0] if "/" in self.metric else "eval"
            if any(name.startswith(("eval/", f"{kind}/")) for name in loop.values):
                raise ValueError(
                    f"EarlyStopping waits for {self.metric!r}, which the report of step "
                    f"{loop.step} does not have; use one of {', '.join(loop.values)}."
                )
            return
        value = float(loop.values[self.metric])
        best = self._best
        # A nan is never an improvement, and nothing would improve on it.
        better = best is None or self._sign * (value - best) > self._min_delta
        if better and not math.isnan(value):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            what = "been a number" if best is None else f"improved on {best}"
            reports = "1 report" if self._waited == 1 else f"{self._waited} reports"
            loop.stop(f"{self.metric} has not {what} in {reports}")

    def state(self) -> dict[str, Any]:
        """The best value and the number of evaluations since."""
        return {"best": self._best, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self._best, self._waited = state["best"], state["waited"]


class TimeLimit(Callback):
    """Stop after some wall time, at the next report.

    The time counts from when this is made, so that a script that makes it first stays
    within the limit of its job. The state is saved, if there is a checkpointer: leave time
    for that.

    **Arguments:**

    - `limit`: seconds, or text such as `"1:30:00"`: hours, minutes and seconds.

    **Raises:**

    `ValueError` if it is not positive, or not such a text.

    !!! Example

        ```python
        callbacks = [eqxshard.callbacks.TimeLimit("23:45:00")]
        ```
    """

    def __init__(self, limit: float | str):
        self._limit = limit
        self._end = time.monotonic() + _seconds(limit)

    def after_report(self, loop: Loop) -> None:
        """Look at the clock."""
        if time.monotonic() >= self._end:
            loop.stop(f"the time limit of {self._limit} is reached")


def _seconds(limit: float | str) -> float:
    try:
        parts = limit.split(":") if isinstance(limit, str) else [limit]
        seconds = sum(float(part) * 60**i for i, part in enumerate(reversed(parts)))
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(
            f"{limit!r} is not a time limit; give a positive number of seconds, or hours, "
            "minutes and seconds such as '1:30:00'."
        )
    return seconds
