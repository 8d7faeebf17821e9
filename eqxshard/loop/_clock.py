"""What a run does at each moment, and where its wall time goes."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import jax

Part = Literal[
    "data",
    "dispatch",
    "device",
    "compile",
    "evaluation",
    "checkpoint",
    "callbacks",
    "log",
    "other",
]


class Phase(NamedTuple):
    """What a run does now.

    - `part`: the part of the wall time that it counts for.
    - `what`: what the run waits for, in the words of the log.
    - `since`: when it began, by `time.perf_counter`.
    """

    part: Part
    what: str
    since: float


class Clock:
    """Knows what a run does, and splits its wall time: each moment counts for one part.

    - `data`: waiting for batches.
    - `dispatch`: handing steps to the devices.
    - `device`: waiting for the devices: for room among the steps in flight, or for the
        metrics of a report.
    - `compile`: tracing and compiling, whatever part it interrupts, in the run's thread.
    - `evaluation`: evaluations.
    - `checkpoint`: saving, and waiting for saves.
    - `callbacks`: callbacks.
    - `log`: reports and trackers.
    - `other`: the rest: what comes before the first batch and after the last step, and
        waiting for the callbacks of other processes.

    It starts when it is made. Compiling is seen within its `with` block.
    """

    def __init__(self):
        now = time.perf_counter()
        #: What the run does now; another object after each change.
        self.now = Phase("other", "the start", now)
        #: The seconds of each part, up to the last reading.
        self.totals = _no_seconds()
        self._seconds = _no_seconds()
        # What came before is in the seconds.
        self._counted_until = now
        self._thread = threading.get_ident()
        # The starts and durations of what was compiled since the last reading.
        self._compiled: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def phase(self, part: Part, what: str) -> Iterator[None]:
        """Count the time of a `with` block for a part; the watchdog sees what it is."""
        outer = self.now
        self._enter(part, what)
        try:
            yield
        finally:
            self._enter(outer.part, outer.what)

    def read(self) -> dict[str, float]:
        """The seconds of each part since the last reading."""
        self._count()
        seconds, self._seconds = self._seconds, _no_seconds()
        self.totals = {part: self.totals[part] + seconds[part] for part in seconds}
        self._compiled.clear()
        return seconds

    def __enter__(self) -> "Clock":
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Unless somebody has cleared all listeners.
        with contextlib.suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _enter(self, part: Part, what: str) -> None:
        self.now = Phase(part, what, self._count())

    def _count(self) -> float:
        """Count the time until now for the current part; return the time."""
        now = time.perf_counter()
        self._seconds[self.now.part] += now - self._counted_until
        self._counted_until = now
        return now

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        """Move the time that something took to compile from its part to `compile`."""
        # The threads of loaders and checkpoints take no time of the run.
        compiles = event.startswith("/jax/core/compile/")
        if not compiles or threading.get_ident() != self._thread:
            return
        now = time.perf_counter()
        added = duration_secs
        start = now - duration_secs
        # A function's time includes that of the functions inside, which began after it.
        while self._compiled and self._compiled[-1][0] >= start:
            added -= self._compiled.pop()[1]
        self._compiled.append((start, duration_secs))
        # JAX measures by another clock, which may be set meanwhile.
        added = min(max(added, 0.0), now - self._counted_until)
        self._seconds["compile"] += added
        self._counted_until += added


def goodput(seconds: Mapping[str, float]) -> float:
    """The share of wall time in which training steps ran, given the seconds of each part.

    This is a lower bound: while the host waits for data, or logs, the last steps that it
    dispatched may still run.
    """
    return (seconds["dispatch"] + seconds["device"]) / sum(seconds.values())


def describe_time(seconds: Mapping[str, float]) -> str:
    """A line with the goodput, and the parts that the rest of the time went to."""
    total = sum(seconds.values())
    parts = [f"goodput {100 * goodput(seconds):.0f} % of {format_duration(total)}"]
    for part in sorted(seconds, key=lambda part: -seconds[part]):
        percent = round(100 * seconds[part] / total)
        if percent and part not in ("dispatch", "device"):
            parts.append(f"{part} {percent} %")
    return " | ".join(parts)


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(get_args(Part), 0.0)


def format_duration(seconds: float) -> str:
    """Seconds as `1.5 s`, `2 min 30 s` or `3 h 5 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
