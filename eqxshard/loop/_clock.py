"""`Clock`: where the wall time of a run goes; and the watchdog of a run that is stuck."""

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

import jax

from ..distributed import abort_process, is_main_process

_LOG = logging.getLogger(__name__)


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
    """A phase of a run, such as an evaluation.

    - `part`: the part of the wall time that it counts for.
    - `what`: what the run waits for, in the words of the log.
    - `since`: when the phase began or last went on, by `time.perf_counter`.
    - `is_limited`: whether the watchdog ends a run that is in it for too long.
    """

    part: Part
    what: str
    since: float
    is_limited: bool = True


class Clock:
    """Knows the phase of a run, and splits its wall time: each moment counts for one part.

    - `data`: waiting for batches.
    - `compile`: the first step, which is traced and compiled.
    - `dispatch`: handing the other steps to the devices.
    - `device`: waiting for the devices: for room among the steps in flight, or for the
        metrics of a report.
    - `evaluation`: evaluations.
    - `checkpoint`: saving, and waiting for saves.
    - `callbacks`: callbacks.
    - `log`: reports and trackers.
    - `other`: the rest: what comes before the first batch and after the last step, and
        waiting for the callbacks of other processes.

    It starts when it is made.
    """

    def __init__(self):
        #: The phase of the run; another object after each change.
        self.now = Phase("other", "the start", time.perf_counter())
        #: The phase that an error ended; `None` once another begins.
        self.failed: Phase | None = None
        #: The seconds of each part, up to the last change or reading.
        self.totals = dict.fromkeys(get_args(Part), 0.0)
        #: `totals` at the last reading: a report has the seconds since then.
        self.at_last_reading = dict(self.totals)
        self._counted_until = self.now.since

    @contextlib.contextmanager
    def phase(self, part: Part, what: str, *, is_limited: bool = True) -> Iterator[None]:
        """Count the time of a `with` block for a part; the watchdog reads `what`."""
        outer = self.now
        self.now, self.failed = Phase(part, what, self._count(), is_limited), None
        try:
            yield
        except BaseException:
            self.failed = self.failed or self.now
            raise
        finally:
            self.now = outer._replace(since=self._count())

    def read(self) -> dict[str, float]:
        """The seconds of each part since the last reading."""
        self._count()
        before, self.at_last_reading = self.at_last_reading, dict(self.totals)
        return {part: total - before[part] for part, total in self.totals.items()}

    def _count(self) -> float:
        """Count the time until now for the current part; return the time."""
        now = time.perf_counter()
        self.totals[self.now.part] += now - self._counted_until
        self._counted_until = now
        return now


@contextlib.contextmanager
def announced(what: str, *, in_logs: bool = False) -> Iterator[None]:
    """Say what takes long, and then how long it took, on a terminal or in a notebook.

    **Arguments:**

    - `what`: the work that takes long, such as `compiling the train step`.
    - `in_logs`: announce it in a log, too, in a line of its own.
    """
    begun = time.perf_counter()
    somebody_looks = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not (somebody_looks and is_main_process()):
        if in_logs and is_main_process():
            # The disk of a log may be full, which is no reason not to train.
            with contextlib.suppress(OSError):
                print(f"{what} ...", file=sys.stderr, flush=True)
        yield
        return
    print(f"{what} ...", end=" ", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(format_duration(time.perf_counter() - begun), file=sys.stderr)


@contextlib.contextmanager
def watch(clock: Clock, hang_seconds: float | None) -> Iterator[None]:
    """End the process of a run that is stuck, after printing the stacks of all threads.

    **Arguments:**

    - `clock`: knows what the run waits for.
    - `hang_seconds`: how long one wait may take; `None` for any time.
    """
    if hang_seconds is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_look, args=(clock, hang_seconds, ended), name="watchdog", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _look(clock: Clock, hang_seconds: float, ended: threading.Event) -> None:
    """Look at the clock until the run has ended; end the process if it is stuck."""
    while not ended.wait(min(hang_seconds / 10, 1.0)):
        phase = clock.now
        waited = time.perf_counter() - phase.since
        if phase.is_limited and waited > hang_seconds:
            faulthandler.dump_traceback(2)
            count = jax.process_count()
            process = f"process {jax.process_index()} of {count}: " if count > 1 else ""
            _LOG.error(
                "%sno progress for %.0f s, longer than hang_seconds=%g: waiting for %s; "
                "the stacks of all threads are above, on stderr. This process ends with "
                "status 1; start the run again, to resume from its newest checkpoint.",
                process,
                waited,
                hang_seconds,
                phase.what,
            )
            # As after an exception, so launchers and schedulers start the run again.
            abort_process(1)


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


def format_duration(seconds: float) -> str:
    """Seconds as `1.5 s`, `2 min 30 s` or `3 h 5 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
