"""Stop on SIGTERM and SIGINT, but save first."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from ..distributed import is_main_process
from ._run import Run

_NOTICE = (
    b"\nstopping after this step, to save a checkpoint; a second signal stops at once.\n"
)


class Stop:
    """Whether a signal asked this run to stop, and which.

    **Arguments:**

    - `listens`: whether the run can be stopped; otherwise signals end the process.
    """

    def __init__(self, listens: bool):
        self.signal: int | None = None
        self._listens = listens

    def requested(self, step: int) -> bool:
        """Whether to end the run after this step: the same step in all processes."""
        if not self._listens:
            return False
        if jax.process_count() == 1:
            return self.signal is not None
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        return reached_preemption_sync_point(step)

    def leave(self, run: Run) -> NoReturn:
        """Raise the exception that ends the run as the signal would have."""
        announce_stop(run)
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signal.SIGTERM)


def announce_stop(run: Run) -> None:
    """Wait for the last checkpoint, and print why a run ends and what is saved of it."""
    run.wait_for_checkpoint()
    saved = run.checkpointer and run.checkpointer.steps()[-1:]
    if is_main_process():
        why = f": {run.stop_reason}" if run.stop_reason else ""
        kept = f"the checkpoint of step {saved[0]} is saved" if saved else "not saved"
        print(f"stopped after step {run.step}{why}; {kept}.", file=sys.stderr)


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
        stop.signal = number
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
