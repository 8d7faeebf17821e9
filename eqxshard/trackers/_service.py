"""What trackers of services share: runs that are continued, and a thread that sends."""

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..sharding._files import read_json
from ._files import write_whole, writing


class KeptRun:
    """Keeps in a file which of a service's runs this one is, and the last step it has.

    - `id`: the run's; `None` for one that is new.
    - `after`: the run has the steps until this one, which a resumed run takes again.

    **Arguments:**

    - `path`: the file.
    - `resume`: whether to continue the run that the file names, if there is one.
    """

    def __init__(self, path: Path, *, resume: bool):
        with writing(path):
            pass  # Its folder is there now.
        self._path = path.absolute()
        self.id: str | None = None
        self.after = -1
        if resume:
            # A damaged one is that of a run that cannot be continued.
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                kept = read_json(path)
                self.id, self.after = str(kept["id"]), int(kept["step"])

    def keep(self, step: int) -> None:
        """Write the file, for a run whose last step is `step`."""
        write_whole(self._path, json.dumps({"id": self.id, "step": step}) + "\n")


class Sender:
    """Calls functions in a thread, one after the other, so that a run waits for no server.

    Errors are raised as `OSError`s at the next call, which `fit` logs.

    **Arguments:**

    - `name`: of the service, in errors.
    """

    def __init__(self, name: str):
        self._name = name
        # Reports of hours. If a server is away for longer, the newer ones are lost.
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(1_000)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        # A process does not wait for it to end.
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, call: Callable[[], object]) -> None:
        """Call a function soon."""
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            raise OSError(f"{self._name} is too slow, so a report is lost") from None
        self._raise()

    def close(self, last: Callable[[], object], seconds: int | float) -> None:
        """Call a last function after all others; wait for them some seconds at most."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            for call in (last, None):
                self._queue.put(call, timeout=max(0, end - time.monotonic()))
        self._thread.join(max(0, end - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._queue.qsize()
            raise OSError(
                f"{self._name} has not taken the last {waiting} reports in {seconds:g} s"
            )
        self._raise()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:
                self._errors.put(error)

    def _raise(self) -> None:
        with contextlib.suppress(queue.Empty):
            error = self._errors.get_nowait()
            raise OSError(f"{self._name} refused a report: {error}") from error


def one_line(error: Exception) -> str:
    """What an error says, as a sentence on one line."""
    return f"{' '.join(str(error).split()).rstrip('.')}."
