"""Being asked to stop: SIGTERM and SIGINT, as long as a run can still be saved."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from .distributed import is_first

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAYS = (
    b"\nstopping after this step, to save a checkpoint; a second signal stops at once.\n"
)


class Stop:
    """Whether this run was asked to stop, and by which signal."""

    def __init__(self):
        self.signal: int | None = None

    def asked(self, step: int) -> bool:
        """Whether to end the run after this step: in all processes after the same."""
        if jax.process_count() == 1:
            return self.signal is not None
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        return reached_preemption_sync_point(step)

    def leave(self, step: int, saved: list[int] | None) -> NoReturn:
        """End the run as the signal would have, but by an exception."""
        if is_first():
            what = "nothing was saved"
            if saved:
                what = f"the checkpoint of step {saved[0]} is saved"
            print(f"stopped after step {step}; {what}.", file=sys.stderr)
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Take note of the first signal; leave the second to the system, which kills.

    Python lets only the main thread say what happens; elsewhere, signals do what they did.
    Where there are several processes, JAX takes note of SIGTERM to any of them, and tells
    the others.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    if jax.process_count() > 1:
        before = signal.signal(
            signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        )
        try:
            yield stop
        finally:
            signal.signal(signal.SIGINT, before)
        return

    def handle(number: int, frame: Any) -> None:
        stop.signal = number
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)
        # Not print, which a signal can find in the middle of itself.
        os.write(2, _SAYS)

    # What a shell has its background jobs ignore stays ignored.
    heeded = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            # One that was not Python's cannot be set again.
            signal.signal(number, handler or signal.SIG_DFL)
