"""Being asked to stop: SIGTERM and SIGINT, as long as a run can still be saved."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAYS = (
    b"\nstopping after this step, to save a checkpoint; a second signal stops at once.\n"
)


class Stop:
    """Whether this process was asked to stop, and by which signal."""

    def __init__(self):
        self.signal: int | None = None

    def leave(self, step: int) -> NoReturn:
        """End the run as the signal would have, but by an exception."""
        print(f"stopped; the checkpoint of step {step} is saved.", file=sys.stderr)
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Take note of the first signal; leave the second to the system, which kills.

    Python lets only the main thread say what happens; elsewhere, signals do what they did.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        stop.signal = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        # Not print, which a signal can find in the middle of itself.
        os.write(2, _SAYS)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
