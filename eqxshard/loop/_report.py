"""Collects the metrics of steps on the devices, and reports their means to trackers."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..training._metrics import Metrics
from ._protocols import Tracker

_LOG = logging.getLogger(__name__)


class Report:
    """The metrics since the last report.

    **Arguments:**

    - `trackers`: receive the reports.
    - `steps_per_epoch`: to report the epoch.
    - `max_nonfinite`: how many steps in a row may be not finite.
    """

    def __init__(
        self, trackers: Sequence[Tracker], steps_per_epoch: int, max_nonfinite: int
    ):
        self._trackers = trackers
        self._steps_per_epoch = steps_per_epoch
        self._max_nonfinite = max_nonfinite
        self._parts: list[Metrics] = []
        self._taken: list[np.ndarray] = []
        self._due: int | None = None
        self._values: dict[str, float] = {}
        self._since = time.perf_counter()
        self._nonfinite_steps: list[int] = []
        #: The values of the last report.
        self.last: dict[str, float] = {}
        #: The last steps, if too many of them in a row were not finite.
        self.too_many_nonfinite: list[int] = []

    def add(self, step: int, metrics: Metrics, count: int, *, due: bool) -> None:
        """Add the metrics of `count` steps (there may be room for more in them)."""
        self._parts.append(metrics)
        self._taken.append(np.arange(metrics.weight.size) < count)
        self._due = step if due else None

    def read(self) -> None:
        """Wait for the metrics that are due; the time until here is training time."""
        if self._due is None or not self._parts:
            return
        taken = np.concatenate(self._taken)
        metrics = jax.tree.map(lambda leaf: leaf[taken], Metrics.stack(self._parts))
        values = metrics.compute()
        seconds = time.perf_counter() - self._since
        examples = float(metrics.weight.sum())
        speed = {"seconds": seconds, "examples_per_second": examples / seconds}
        self._values = _prefixed("train", {**values, **speed})
        self._parts, self._taken = [], []
        first = self._due - len(metrics.nonfinite) + 1
        for step, nonfinite in enumerate(metrics.nonfinite, start=first):
            self._nonfinite_steps = [*self._nonfinite_steps, step] if nonfinite else []
            if len(self._nonfinite_steps) >= self._max_nonfinite:
                self.too_many_nonfinite = self._nonfinite_steps

    def add_evaluation(self, values: Mapping[str, float]) -> None:
        """Add the result of an evaluation."""
        if not isinstance(values, Mapping):
            raise TypeError(
                f"evaluate returned a {type(values).__name__}; return a dict of metrics."
            )
        self._values |= _prefixed("eval", values)

    def flush(self) -> None:
        """Report the steps since the last report, and restart the clock."""
        if self._due is None:
            return
        self.read()
        self.last = {"epoch": self._due / self._steps_per_epoch, **self._values}
        for tracker in self._trackers:
            tell(tracker.log, self._due, self.last)
        self._values, self._due = {}, None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time until now from the next report's training time."""
        self._since = time.perf_counter()


def tell(method: Callable[..., None], *args: Any) -> None:
    """Call a tracker; a full disk, or another error of files, does not end a run."""
    try:
        method(*args)
    except OSError as error:
        _LOG.error("a tracker failed: %s. Training continues.", error)


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
