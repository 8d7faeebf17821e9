"""Logs where a run is stuck, if it waits too long, and may end it."""

import contextlib
import logging
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

from ..distributed import abort_process, post, read_posts

_LOG = logging.getLogger(__name__)


#: The waits for something that all processes do.
_TOGETHER = ("step ", "the checkpoint", "the last checkpoint", "the others' callbacks")
#: Others may stall a little later.
_LATER_SECONDS = 5.0
#: As after an exception, so launchers and schedulers start the run again.
_HANG_STATUS = 1


class Watchdog:
    """Logs a stall, with the stack of every thread, and its end; ends a run that hangs.

    Of several processes that stall, each also logs what the others wait for.

    **Arguments:**

    - `stall_seconds`: how long one wait may take before it is logged; `None` for any time.
    - `hang_seconds`: how long one wait may take before the process ends; `None` for any
        time.

    **Raises:**

    `ValueError` if one of them is not positive.
    """

    def __init__(self, stall_seconds: float | None, hang_seconds: float | None = None):
        limits = {"stall_seconds": stall_seconds, "hang_seconds": hang_seconds}
        for name, seconds in limits.items():
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"{name} must be positive, got {seconds}; use None for never."
                )
        self._hang_seconds = hang_seconds
        # What ends a run is logged first, with stacks.
        given = [seconds for seconds in limits.values() if seconds is not None]
        self._stall_seconds = min(given, default=None)
        self._waits = ("the start", time.monotonic())
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def waits_for(self, what: str) -> None:
        """Note the end of the last wait, and the name of the next one."""
        self._waits = (what, time.monotonic())

    def __enter__(self) -> "Watchdog":
        if self._stall_seconds is not None:
            self._thread = threading.Thread(
                target=self._watch,
                args=(self._stall_seconds,),
                name="watchdog",
                daemon=True,
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
        # When to tell what the others wait for.
        later: float | None = None
        ended = False
        while not ended:
            # Looks once more at the end, to log the end of a stall.
            ended = self._ended.wait(min(seconds / 10, 1.0))
            waits, now = self._waits, time.monotonic()
            waited = now - waits[1]
            if stalled is not None and waits is not stalled:
                took = waits[1] - stalled[1]
                _LOG.warning("%s came after %.0f s; training continues.", stalled[0], took)
                stalled = later = None
                _post(None)
            if later is not None and now > later:
                later = None
                _log_posts()
            if stalled is None and not ended and waited > seconds:
                stalled, later = waits, now + _LATER_SECONDS
                _post(waits[0])
                _LOG.error(
                    "%sno progress for %.0f s: waiting for %s. The stacks of all "
                    "threads:\n%s",
                    _process(),
                    waited,
                    waits[0],
                    _stacks(),
                )
            # Not before the others could post what they wait for.
            hangs = stalled is not None and later is None and not ended
            if hangs and self._hang_seconds is not None and waited > self._hang_seconds:
                _LOG.error(
                    "%sno progress for %.0f s, longer than hang_seconds=%g: %s This "
                    "process ends with status %d; start the run again, to resume from its "
                    "newest checkpoint.",
                    _process(),
                    waited,
                    self._hang_seconds,
                    _describe_posts() or f"waiting for {waits[0]}.",
                    _HANG_STATUS,
                )
                abort_process(_HANG_STATUS)


def _post(what: str | None) -> None:
    if jax.process_count() > 1:
        # It is only for the log.
        with contextlib.suppress(Exception):
            post("waits", what)


def _log_posts() -> None:
    """Log which process waits for what, and which of them the others wait for."""
    says = _describe_posts()
    if says is not None:
        _LOG.error("%s%s", _process(), says)


def _describe_posts() -> str | None:
    """Which process waits for what, if there are several and their posts can be read."""
    if jax.process_count() == 1:
        return None
    try:
        posts = read_posts("waits")
    except Exception:
        return None
    waits = {number: posts.get(number) for number in range(jax.process_count())}
    # Steps and checkpoints wait for all processes; everything else is a process's own.
    own = [n for n, what in waits.items() if not (what or "").startswith(_TOGETHER)]
    says = "; ".join(
        f"process {number} for {what}" if what else f"process {number} says nothing"
        for number, what in waits.items()
    )
    guess = f" Most likely all wait for process {own[0]}." if len(own) == 1 else ""
    return f"the processes wait: {says}.{guess}"


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
