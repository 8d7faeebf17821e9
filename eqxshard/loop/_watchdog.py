"""Logs where a run is stuck, if it waits too long, and may end it."""

import logging
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

from ..distributed import abort_process
from ._clock import Clock, Phase

_LOG = logging.getLogger(__name__)

#: As after an exception, so launchers and schedulers start the run again.
_HANG_STATUS = 1


class Watchdog:
    """Logs a stall, with the stack of every thread, and its end; ends a run that hangs.

    **Arguments:**

    - `clock`: knows what the run waits for.
    - `stall_seconds`: how long one wait may take before it is logged; `None` for any time.
    - `hang_seconds`: how long one wait may take before the process ends; `None` for any
        time.

    **Raises:**

    `ValueError` if one of them is not positive.
    """

    def __init__(
        self, clock: Clock, stall_seconds: float | None, hang_seconds: float | None = None
    ):
        limits = {"stall_seconds": stall_seconds, "hang_seconds": hang_seconds}
        for name, seconds in limits.items():
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"{name} must be positive, got {seconds}; use None for never."
                )
        self._clock = clock
        self._hang_seconds = hang_seconds
        # What ends a run is logged first, with stacks.
        given = [seconds for seconds in limits.values() if seconds is not None]
        self._stall_seconds = min(given, default=None)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._stall_seconds is not None:
            self._thread = threading.Thread(
                target=self._watch,
                args=(self._stall_seconds,),
                name="watchdog",
                daemon=True,
            )
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

    def _watch(self, stall_seconds: float) -> None:
        stalled: Phase | None = None
        ended = False
        while not ended:
            # Looks once more at the end, to log the end of a stall.
            ended = self._ended.wait(min(stall_seconds / 10, 1.0))
            phase = self._clock.now
            waited = time.perf_counter() - phase.since
            if stalled is not None and phase is not stalled:
                took = phase.since - stalled.since
                _LOG.warning(
                    "%s came after %.0f s; training continues.", stalled.what, took
                )
                stalled = None
            if ended:
                return
            if stalled is None and waited > stall_seconds:
                stalled = phase
                stacks = _stacks()
                _LOG.error("%s. The stacks of all threads:\n%s", _describe(phase), stacks)
            if self._hang_seconds is not None and waited > self._hang_seconds:
                _LOG.error(
                    "%s, longer than hang_seconds=%g. This process ends with status %d; "
                    "start the run again, to resume from its newest checkpoint.",
                    _describe(phase),
                    self._hang_seconds,
                    _HANG_STATUS,
                )
                abort_process(_HANG_STATUS)


def _describe(phase: Phase) -> str:
    """What a run waits for, since when, and which of several processes does."""
    count = jax.process_count()
    process = f"process {jax.process_index()} of {count}: " if count > 1 else ""
    waited = time.perf_counter() - phase.since
    return f"{process}no progress for {waited:.0f} s: waiting for {phase.what}"


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
