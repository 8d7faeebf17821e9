"""Stop on SIGTERM and SIGINT, but save first."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

_NOTICE = (
    b"\nstopping after this step, to save a checkpoint; a second signal stops at once.\n"
)


class Stop:
    """The signal that asked this run to stop, if one did.

    - `signal`: its number, in the process that got it.
    - `requested`: true if the run is to end. All processes know it after the same step.

    **Arguments:**

    - `listens`: whether the run can be stopped; otherwise signals end the process.
    """

    def __init__(self, listens: bool):
        self.signal: int | None = None
        self.requested = False
        self._listens = listens

    def look(self, step: int) -> bool:
        """True if the run is to end after this step, the same step in all processes."""
        if self._listens and jax.process_count() > 1:
            from jax.experimental.multihost_utils import reached_preemption_sync_point

            self.requested = reached_preemption_sync_point(step)
        return self.requested

    def leave(self) -> NoReturn:
        """Raise the exception that ends the run as the signal would have."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def stop_signals(*, can_save: bool) -> Iterator[Stop]:
    """Note the first signal; leave the second to the system, which kills the process.

    Python lets only the main thread handle signals; elsewhere they act as before. With
    several processes, JAX notes a SIGTERM to any of them, and tells the others.

    **Arguments:**

    - `can_save`: whether the run can save its state; otherwise a single process does not
        handle signals.
    """
    listens = can_save or jax.process_count() > 1
    stop = Stop(listens)
    if not listens or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def tell_all(number: int, frame: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def handle(number: int, frame: Any) -> None:
        stop.signal, stop.requested = number, True
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
        # Not print, which the signal may have interrupted.
        os.write(2, _NOTICE)

    several = jax.process_count() > 1
    numbers = (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT)
    # A signal that is ignored, as by a shell's background jobs, stays ignored.
    handled = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    handler = tell_all if several else handle
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield stop
    finally:
        for number, earlier in before.items():
            # A handler that is not Python's cannot be restored.
            signal.signal(number, earlier or signal.SIG_DFL)
