"""Where the time between two reports goes."""

import time
from typing import Literal

Phase = Literal["data", "dispatch", "device", "log"]


class Clock:
    """Splits the time since the last report: each moment counts for one phase, or none.

    - `data`: waiting for batches.
    - `dispatch`: handing steps to the devices, which the first time compiles them.
    - `device`: waiting for the devices: for room among the steps in flight, or for the
        metrics of a report.
    - `log`: all else: reports, trackers, callbacks.
    """

    def __init__(self):
        self._mark = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.read()

    def lap(self, phase: Phase) -> None:
        """Count the time since the last call for a phase."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._mark
        self._mark = now

    def skip(self) -> None:
        """Count the time since the last call for none."""
        self._mark = time.perf_counter()

    def read(self) -> dict[str, float]:
        """The seconds of each phase since the last reading."""
        seconds = self._seconds
        self._seconds = {"data": 0.0, "dispatch": 0.0, "device": 0.0, "log": 0.0}
        return seconds
