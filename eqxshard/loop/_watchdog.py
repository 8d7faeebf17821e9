"""Logs where a run is stuck, if it waits too long."""

import contextlib
import logging
import sys
import threading
import time
import traceback
from types import TracebackType

import jax

from ..distributed import post, read_posts

_LOG = logging.getLogger(__name__)


#: The waits for something that all processes do.
_TOGETHER = ("step ", "the checkpoint", "the last checkpoint")
#: Others may stall a little later.
_LATER_SECONDS = 5.0


class Watchdog:
    """Logs a stall, with the stack of every thread, and its end.

    Of several processes that stall, each also logs what the others wait for.

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
        # When to tell what the others wait for.
        later: float | None = None
        ended = False
        while not ended:
            # Looks once more at the end, to log the end of a stall.
            ended = self._ended.wait(min(seconds / 10, 1.0))
            waits, now = self._waits, time.monotonic()
            if stalled is not None and waits is not stalled:
                took = waits[1] - stalled[1]
                _LOG.warning("%s came after %.0f s; training continues.", stalled[0], took)
                stalled = later = None
                _post(None)
            if later is not None and now > later:
                later = None
                _log_posts()
            if stalled is None and not ended and now - waits[1] > seconds:
                stalled, later = waits, now + _LATER_SECONDS
                _post(waits[0])
                _LOG.error(
                    "%sno progress for %.0f s: waiting for %s. The stacks of all "
                    "threads:\n%s",
                    _process(),
                    now - waits[1],
                    waits[0],
                    _stacks(),
                )


def _post(what: str | None) -> None:
    if jax.process_count() > 1:
        # It is only for the log.
        with contextlib.suppress(Exception):
            post(what)


def _log_posts() -> None:
    """Log which process waits for what, and which of them the others wait for."""
    if jax.process_count() == 1:
        return
    try:
        posts = read_posts()
    except Exception:
        return
    waits = {number: posts.get(number) for number in range(jax.process_count())}
    # Steps and checkpoints wait for all processes; everything else is a process's own.
    own = [n for n, what in waits.items() if not (what or "").startswith(_TOGETHER)]
    says = "; ".join(
        f"process {number} for {what}" if what else f"process {number} says nothing"
        for number, what in waits.items()
    )
    guess = f" Most likely all wait for process {own[0]}." if len(own) == 1 else ""
    _LOG.error("%sthe processes wait: %s.%s", _process(), says, guess)


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
