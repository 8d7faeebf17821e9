"""`Report`: collects the metrics of steps, and reports their means to trackers."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import UsageTypeError
from ..data._order import Steps
from ..training._examples import Metrics
from ._clock import Clock, goodput
from ._skipped import Skipped
from ._tracker import Image, Tracker, Value

_LOG = logging.getLogger(__name__)


class Report:
    """The metrics since the last report, and values that callbacks log.

    - `values`: the values of the last report that was read, and what was logged since.
    - `step`: the step of that report.
    - `skipped`: all steps, up to that report, that were not finite.
    - `nonfinite_steps`: the last steps in a row, up to that report, that were not finite.

    **Arguments:**

    - `trackers`: receive the reports.
    - `clock`: splits the time of the run.
    - `epochs`: the epoch that each step is in, to report it; `None` without epochs.
    """

    def __init__(self, trackers: Sequence[Tracker], clock: Clock, epochs: Steps | None):
        self.values: dict[str, Any] = {}
        self.step: int | None = None
        self.nonfinite_steps: list[int] = []
        self.skipped = Skipped()
        self._trackers = trackers
        self._clock = clock
        self.epochs = epochs
        # The metrics of each dispatch since the last report, and which of its steps count.
        self._parts: list[Metrics] = []
        self._taken: list[np.ndarray] = []
        # The last step of these.
        self._added = 0
        # The step of a report that is due and not sent yet.
        self._due: int | None = None
        # The values that were logged and not sent yet, and their step.
        self._logged: dict[str, Any] = {}
        self._logged_at = 0
        self.restart_speed()

    def add(self, step: int, metrics: Metrics, count: int, *, due: bool) -> None:
        """Add the metrics of `count` steps (there may be room for more in them)."""
        self._parts.append(metrics)
        self._added = step
        self._taken.append(np.arange(metrics.weight.size) < count)
        self._due = step if due else None

    def read(self) -> None:
        """Wait for the metrics that are due; the time until here is training time."""
        if self._due is None or not self._parts:
            return
        with self._clock.phase("device", f"the metrics of step {self._due}"):
            taken = np.concatenate(self._taken)
            metrics = jax.tree.map(lambda leaf: leaf[taken], Metrics.stack(self._parts))
        seconds = time.perf_counter() - self._training_since
        compiling = self._clock.totals["compile"] - self._compiled_before
        # Leave the first call, which compiled, out of the speed if there are others.
        without = self._taken[0].sum() if compiling and len(self._parts) > 1 else 0
        examples = float(metrics.weight[without:].sum())
        running = seconds - compiling if without else seconds
        self._parts, self._taken = [], []
        speed = {"seconds": seconds, "examples_per_second": examples / running}
        training = prefixed("train", {**metrics.compute(), **speed})
        self.step = self._due
        self.values = self._with_epoch(self._due, training) | self._logged
        first = self._due - len(metrics.nonfinite) + 1
        for step, nonfinite in enumerate(metrics.nonfinite, start=first):
            self.nonfinite_steps = [*self.nonfinite_steps, step] if nonfinite else []
            if nonfinite:
                self.skipped.add(step)

    def add_evaluation(self, values: Mapping[str, Any], prefix: str = "eval") -> None:
        """Add the result of an evaluation; trackers get all of it but arrays."""
        if not isinstance(values, Mapping):
            raise UsageTypeError(
                f"evaluate returned a {type(values).__name__}; return a dict of metrics."
            )
        self.values |= prefixed(prefix, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add values of a step, to its report or to a line of their own."""
        # Copied, because an array of the state is donated before this is sent.
        copies = {k: v.copy() if isinstance(v, jax.Array) else v for k, v in values.items()}
        self._logged |= copies
        self._logged_at = step
        self.values = self.values | copies

    def flush(self) -> None:
        """Report the steps since the last report, if they are due, and what was logged."""
        if self._due is not None:
            self.read()
            step, self._due = self._due, None
            with self._clock.phase("log", f"the report of step {step}"):
                self.values |= self._take_logged()
                self.values |= prefixed("seconds", self._clock.read())
                self.values["goodput"] = goodput(self._clock.totals)
                self._send(step, self.values)
            self.restart_speed()
        elif self._logged:
            step = self._logged_at
            with self._clock.phase("log", f"what was logged at step {step}"):
                self._send(step, self._with_epoch(step, self._take_logged()))

    def close(self) -> None:
        """Report what is left, if something other than the last step ends the run."""
        if self._parts:
            self._due = self._added
        self.flush()

    def restart_speed(self) -> None:
        """Exclude the time until now from the next report's training time."""
        self._training_since = time.perf_counter()
        self._compiled_before = self._clock.totals["compile"]

    def _with_epoch(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        epoch = {} if self.epochs is None else {"epoch": self.epochs.epochs(step)}
        return {**epoch, **values}

    def _take_logged(self) -> dict[str, Value]:
        """Wait for the values that were logged."""
        logged, self._logged = self._logged, {}
        return {name: _value(name, value) for name, value in logged.items()}

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            # If one fails, the others still get the report.
            for tracker in reversed(self._trackers):
                stack.callback(tell, tracker.log, step, shown(values))


def tell(method: Callable[..., None], *args: Any) -> None:
    """Call a tracker; a full disk, or another error of files, does not end a run."""
    try:
        method(*args)
    except OSError as error:
        _LOG.error("a tracker failed: %s. Training continues.", error)


def shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without arrays, such as confusion matrices, which are for callbacks."""
    return {name: value for name, value in values.items() if np.ndim(value) == 0}


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under names such as `train/loss`."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _value(name: str, value: Any) -> Value:
    if isinstance(value, Image):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageTypeError(
            f"{name} was logged as a {type(value).__name__}; log numbers, or make it an "
            "eqxshard.trackers.Image."
        ) from None
