"""Logs where a run is stuck, if it waits too long."""

import logging
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

_LOG = logging.getLogger(__name__)


class Watchdog:
    """Logs a stall, with the stack of every thread, and its end.

    **Arguments:**

    - `seconds`: how long one wait may take; `None` for any time.

    **Raises:**

    `ValueError` if that is not positive.
    """

    def __init__(self, seconds: float | None):
        if seconds is not None and not seconds > 0:
            raise ValueError(
                f"stall_seconds must be positive, got {seconds}; use None for never."
            )
        self._seconds = seconds
        self._waits = ("the start", time.monotonic())
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def waits_for(self, what: str) -> None:
        """Note the end of the last wait, and the name of the next one."""
        self._waits = (what, time.monotonic())

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
            )
            self.waits_for("the start")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, seconds: float) -> None:
        stalled: tuple[str, float] | None = None
        ended = False
        while not ended:
            # Looks once more at the end, to log the end of a stall.
            ended = self._ended.wait(min(seconds / 10, 1.0))
            waits, now = self._waits, time.monotonic()
            if stalled is not None and waits is not stalled:
                took = waits[1] - stalled[1]
                _LOG.warning("%s came after %.0f s; training continues.", stalled[0], took)
                stalled = None
            if stalled is None and not ended and now - waits[1] > seconds:
                stalled = waits
                _LOG.error(
                    "%sno progress for %.0f s: waiting for %s. The stacks of all "
                    "threads:\n%s",
                    _process(),
                    now - waits[1],
                    waits[0],
                    _stacks(),
                )


def _process() -> str:
    count = jax.process_count()
    return f"process {jax.process_index()} of {count}: " if count > 1 else ""


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
