"""Arrays on their way to a folder that all processes write to.

The processes share a folder, and no barrier: each leaves a file there once its part is
written, or could not be.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..distributed import is_main_process
from ..sharding._files import is_remote, sync_all, write_at_once
from ..sharding._leaves import is_key
from ._database import merge, part_of_process
from ._object_store import ARRAYS, context, kvstore
from ._parts import copy_parts, write_parts

#: The folder of the marks that processes leave.
WRITTEN = "written"
#: A chunk has at most this many bytes, if the array's part on a device can be halved. In an
#: object store, each is an object.
_CHUNK_BYTES, _OBJECT_BYTES = 2**21, 2**26
#: How much longer than this process itself to wait for the others.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.5


class Save:
    """A save that has begun; `result` writes.

    **Arguments:**

    - `folder`: an `etils.epath.Path`, in which no process has written yet.
    - `leaves`: the arrays by path. Their parts are copied here, so they may be donated.
    - `name`: its own, of all processes: nothing of another save of this step is taken for
        its, whenever that was written.
    """

    def __init__(self, folder: Any, leaves: Mapping[str, jax.Array], name: str):
        arrays = {
            path: jax.random.key_data(leaf) if is_key(leaf) else leaf
            for path, leaf in leaves.items()
            # There is nothing to save of empty ones.
            if leaf.size
        }
        self._folder, self._name = folder, name
        self.given_up = threading.Event()
        self._parts = copy_parts(
            arrays, _OBJECT_BYTES if is_remote(folder) else _CHUNK_BYTES
        )

    def give_up(self) -> None:
        """Write no more, and wait for other processes no longer."""
        self.given_up.set()

    def result(self) -> None:
        """Write this process's parts; process 0 also waits for those of the others.

        **Raises:**

        `OSError` if a part could not be written, or the save was given up.
        """
        began = time.monotonic()
        fault = _fault_of(self._write)
        if jax.process_count() > 1:
            marks = self._folder / WRITTEN / self._name
            mark = marks / str(jax.process_index())
            fault = fault or _fault_of(lambda: _leave(mark, fault or ""))
            if is_main_process() and fault is None:
                fault = self._wait_for_others(marks, time.monotonic() - began)
        if fault is None and is_main_process() and not is_remote(self._folder):
            fault = _fault_of(lambda: merge(self._folder, self._name))
        if fault is not None:
            raise OSError(fault)

    def _write(self) -> None:
        if is_remote(self._folder):
            base, settings = kvstore(self._folder / ARRAYS), context()
            write_parts(self._parts, base, settings, self.given_up, atomic=False)
            return
        import tensorstore as ts

        base = part_of_process(self._folder, self._name)
        # TensorStore would wait for the disk after each batch.
        settings = ts.Context({"file_io_sync": False})
        write_parts(self._parts, base, settings, self.given_up, atomic=True)
        sync_all(base["base"]["path"])

    def _wait_for_others(self, marks: Any, seconds: float) -> str | None:
        """Wait until every process has written; return a sentence if one could not."""
        began = time.monotonic()
        missing = set(range(jax.process_count()))
        while time.monotonic() - began < seconds + _PATIENCE_SECONDS:
            there = {mark.name for mark in marks.iterdir()}
            for process in [each for each in missing if str(each) in there]:
                fault = (marks / str(process)).read_text()
                if fault:
                    return f"process {process}: {fault}"
                missing.discard(process)
            if not missing:
                return None
            if self.given_up.wait(_POLL_SECONDS):
                break
        return f"process {min(missing)} has not written its part"


def _fault_of(write: Callable[[], Any]) -> str | None:
    """What a function that writes raises; `None` if nothing."""
    try:
        write()
    # TensorStore's are ValueErrors, mostly, and end with what it was asked to do.
    except Exception as error:
        return str(error).partition(" [")[0] or type(error).__name__
    return None


def _leave(mark: Any, text: str) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    write_at_once(mark, text)
