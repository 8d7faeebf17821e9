"""Writes checkpoints in a thread while training continues.

The processes share a folder, and no barrier: each leaves a file there once it has written
its part, or failed to.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._errors import UsageError, UsageOSError
from ..distributed import allgather_json, broadcast_from_first, is_main_process
from ..sharding._files import is_remote, sync_all, write_at_once
from ..sharding._leaves import is_key
from ..sharding._text import first_few
from ._agree import attempt, reason, share
from ._arrays import copy_parts, merge, part_of_process, write_parts
from ._folder import WRITTEN, CheckpointFolder, listed

_LOG = logging.getLogger(__name__)

# One save, by this process and the others

#: A chunk has at most this many bytes, if the array's part on a device can be halved. Those
#: in an object store, which takes a while to answer, are larger.
_CHUNK_BYTES, _OBJECT_BYTES = 2**21, 2**26
#: How much longer to wait for the other processes than this one took.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.5


class Save:
    """A save that has begun: it holds copies of the arrays, and `result` writes them.

    **Arguments:**

    - `folder`: an `etils.epath.Path`, in which no process has written yet.
    - `leaves`: the arrays by path. Their parts are copied here, so they may be donated.
    - `name`: the name of this save, the same in all processes. No other save has it, so
        files that another save of this step left are not taken for this one's.
    """

    def __init__(self, folder: Any, leaves: Mapping[str, jax.Array], name: str):
        arrays = {
            path: jax.random.key_data(leaf) if is_key(leaf) else leaf
            for path, leaf in leaves.items()
            # Empty arrays have nothing to save.
            if leaf.size
        }
        self._folder, self._name = folder, name
        self.given_up = threading.Event()
        self._parts = copy_parts(
            arrays, _OBJECT_BYTES if is_remote(folder) else _CHUNK_BYTES
        )

    def give_up(self) -> None:
        """Stop writing, and stop waiting for other processes."""
        self.given_up.set()

    def result(self) -> None:
        """Write this process's parts; process 0 also waits for those of the others.

        **Raises:**

        Any error of writing this process's parts; `OSError` if another process could not
        write its own, or did not in time.
        """
        began = time.monotonic()
        try:
            self._write()
        except Exception as error:
            # The others must not wait for this process. If they gave up, the folder may be
            # gone.
            if not self.given_up.is_set():
                with contextlib.suppress(Exception):
                    self._tell_others(_said(error))
            raise
        self._tell_others("")
        if is_main_process():
            self._wait_for_others(time.monotonic() - began)
            merge(self._folder, self._name)

    def _write(self) -> None:
        part = part_of_process(self._folder, self._name)
        write_parts(self._parts, part, self.given_up)
        if not is_remote(part):
            sync_all(part)

    @property
    def _marks(self) -> Any:
        """The folder of the files that processes leave once they have written."""
        return self._folder / WRITTEN / self._name

    def _tell_others(self, fault: str) -> None:
        """Leave this process's file: the reason why it could not write, or nothing."""
        if jax.process_count() > 1:
            self._marks.mkdir(parents=True, exist_ok=True)
            write_at_once(self._marks / str(jax.process_index()), fault)

    def _wait_for_others(self, seconds: float) -> None:
        """Wait until every process has written; raise `OSError` if one could not.

        **Arguments:**

        - `seconds`: how long this process took.
        """
        began = time.monotonic()
        missing = {*range(jax.process_count())} - {0}
        while missing and time.monotonic() - began < seconds + _PATIENCE_SECONDS:
            there = {mark.name for mark in self._marks.iterdir()}
            for process in [each for each in missing if str(each) in there]:
                if fault := (self._marks / str(process)).read_text():
                    raise OSError(f"process {process}: {fault}")
                missing.discard(process)
            if missing and self.given_up.wait(_POLL_SECONDS):
                break
        if missing:
            raise OSError(f"process {min(missing)} has not written its part")


def _said(error: Exception) -> str:
    """The text of an error, in one line."""
    text = str(error)
    if not isinstance(error, UsageError | OSError):
        # Errors of TensorStore, mostly `ValueError`s, end with the request that failed.
        text = text.partition(" [")[0]
    return " ".join(text.split())[:300].rstrip(".") or type(error).__name__


# One save after the other

#: How long processes wait for a checkpoint before they ask each other how it goes.
_TOGETHER_SECONDS = 2.0

#: How often they ask each other whether a failed save has ended in all of them: the file
#: system of one may hang.
_QUESTIONS = 30

#: The part of an error of TensorStore that a user needs; around it are codes and paths.
_DISK_IS_FULL = "No space left on device"


class CheckpointWriter:
    """Writes one checkpoint at a time; a failure is logged, and training continues.

    **Arguments:**

    - `folder`: the folder of the run's checkpoints.
    - `outdated`: called with the step of a new checkpoint, returns the steps whose
        checkpoints to remove.
    """

    def __init__(self, folder: CheckpointFolder, outdated: Callable[[int], Iterable[int]]):
        self._folder = folder
        self._outdated = outdated
        # One thread, so that checkpoints do not overlap; started when first needed.
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        #: The save that is waited for.
        self._current: Save | None = None
        self._error: str | None = None
        self._is_settled = True

    def start(
        self,
        leaves: Mapping[str, Array],
        trained: Container[str],
        description: dict[str, Any],
    ) -> None:
        """Begin to write a checkpoint, unless there is one; return once arrays are copied.

        Waits for the last checkpoint first.

        **Arguments:**

        - `leaves`: the arrays by their paths.
        - `trained`: the paths of arrays that must not be infinite. Others may be, such as
            the best loss so far, but not NaN.
        - `description`: the description that is written beside the arrays.
        """
        self.settle()
        self._error, self._is_settled = None, False
        step = description["step"]
        if broadcast_from_first(is_main_process() and step in self._folder.known_steps()):
            return
        if flawed := _find_flawed(leaves, trained):
            if is_main_process():
                _LOG.error(
                    "the state of step %d is not finite (%s) and was not saved; the newest "
                    "checkpoint: %s.",
                    step,
                    first_few(flawed),
                    listed(self._folder.steps()[-1:]),
                )
            return
        outcome = attempt(lambda: self._make_room(step)) if is_main_process() else None
        told = share(outcome)
        try:
            name = told.get()
        # Whatever keeps a checkpoint from being written, training continues.
        except Exception as error:
            self._report_failure(step, error)
            if is_main_process():
                self._clean()
            return
        # A damaged checkpoint of this step is about to be replaced; all processes must
        # agree on which ones are damaged.
        self._folder.damaged.pop(step, None)
        try:
            save = Save(self._folder.at(step), leaves, name)
        except Exception as error:
            self._fail(step, error)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "eqxshard-checkpoint")
        self._current = save
        self._pending = self._thread.submit(self._finish, save, description)

    def close(self) -> None:
        """Wait for the last checkpoint, whether or not it succeeds."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def wait(self) -> None:
        """Wait for the last checkpoint; raise `OSError` if it failed in any process."""
        self.settle()
        if self._error is not None:
            raise UsageOSError(self._error)

    def settle(self) -> None:
        """Wait for the last checkpoint, with all processes.

        If it failed in one, it failed in all: the others stop writing, and what was written
        is removed.
        """
        questions = 0
        while True:
            pending = [] if self._pending is None else [self._pending]
            seconds = None if jax.process_count() == 1 else _TOGETHER_SECONDS
            is_done = not wait(pending, seconds).not_done
            everyone = allgather_json([is_done, self._error])
            errors = [error for _, error in everyone if error is not None]
            have_ended = all(done for done, _ in everyone)
            if have_ended or questions == _QUESTIONS:
                break
            if errors:
                questions += 1
                if self._current is not None:
                    self._current.give_up()
        if errors and not self._is_settled and is_main_process():
            if self._error is None:
                self._tell(errors[0])
            if have_ended:
                self._clean()
        if not is_done:
            # Its file system hangs: the next save gets a thread of its own.
            self._thread = None
        self._error = errors[0] if errors else None
        self._pending = self._current = None
        self._is_settled = True

    def _make_room(self, step: int) -> str:
        """Make the folder of a step; return the name of the save."""
        self._folder.claim()
        self._remove_old(self._folder.clean)
        self._folder.make(step)
        return uuid.uuid4().hex[:8]

    def _finish(self, save: Save, description: dict[str, Any]) -> None:
        step = description["step"]
        try:
            save.result()
            if not is_main_process() or save.given_up.is_set():
                return
            self._folder.complete(description)
        except Exception as error:
            if not save.given_up.is_set():
                self._fail(step, error)
            return
        self._remove_old(lambda: [*map(self._folder.remove, self._outdated(step))])

    def _remove_old(self, remove: Callable[[], Any]) -> None:
        """Call a function that removes old checkpoints; log an error, and go on."""
        try:
            remove()
        except Exception as error:
            _LOG.error("old checkpoints could not be removed: %s.", reason(error))

    def _fail(self, step: int, error: Exception) -> None:
        """Report that this process cannot write a checkpoint."""
        self._report_failure(step, error)
        # Other processes may still be writing.
        if jax.process_count() == 1:
            self._clean()

    def _report_failure(self, step: int, error: Exception) -> None:
        why = _said(error)
        if _DISK_IS_FULL in why:
            why = f"{_DISK_IS_FULL}; free some, or give the run another folder"
        if jax.process_count() > 1:
            why = f"process {jax.process_index()}: {why}"
        others = [other for other in self._folder.known_steps() if other != step]
        self._tell(
            f"the checkpoint of step {step} could not be written to {self._folder.path}: "
            f"{why}; the newest checkpoint: {listed(others[-1:])}."
        )

    def _tell(self, error: str) -> None:
        self._error = error
        _LOG.error("%s Training continues.", error)

    def _clean(self) -> None:
        """Free the space of what was written: the disk may be full."""
        self._folder.end()
        # Nothing may be removed from a folder that could not be claimed.
        if self._folder.claimed:
            with contextlib.suppress(Exception):
                self._folder.clean()


def _find_flawed(leaves: Mapping[str, Array], trained: Container[str]) -> list[str]:
    """The paths of arrays that have NaNs, or forbidden infinities, in any process."""
    flaws = {
        path: _has_flaw(leaf, path in trained)
        for path, leaf in leaves.items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    everyone = allgather_json([path for path, flaw in flaws.items() if flaw])
    return sorted({path for paths in everyone for path in paths})


def _has_flaw(leaf: Array, is_trained: bool) -> Any:
    """True if an array is NaN somewhere or, if it is trained, infinite."""
    if next(iter(leaf.devices())).platform != "cpu":
        return _find_on_devices(leaf, is_trained, jnp)
    # The memory is the host's, so NumPy can read it: a program for each shape would take
    # seconds to compile.
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return any(_find_flaw(np.asarray(shard.data), is_trained, np) for shard in shards)


def _find_flaw(x: Any, is_trained: bool, numpy: Any) -> Any:
    if not is_trained:
        return numpy.any(numpy.isnan(x))
    # A mask may count as trained, and holds minus infinity.
    return ~numpy.all(numpy.isfinite(x) | (x == -numpy.inf))


_find_on_devices = jax.jit(_find_flaw, static_argnums=(1, 2))
