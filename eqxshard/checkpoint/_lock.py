"""The lock on a folder that one program at a time writes to."""

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ..sharding._paths import is_remote

_LOG = logging.getLogger(__name__)

#: The file in the folder. What it says is only for messages.
FILE = "lock"
#: Not through a link, which may lead to a file that is not ours to write to.
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
#: How long a file server may keep the locks of a host that died.
_GRACE_SECONDS = 120.0

#: The locked files of this process. The system unlocks them when it ends, however it ends.
_HELD: dict[str, int] = {}


class FolderLock:
    """Keeps other programs from writing to a folder; those of this process share the lock.

    Object stores, and file systems without locks, are left unlocked.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    """

    def __init__(self, folder: Any):
        self._folder = folder
        self._path = os.path.join(folder, FILE)
        self._file: int | None = None
        self._claims = 0
        #: A sentence if another program had the folder at the last try.
        self.refusal: str | None = None

    def acquire(self) -> str | None:
        """Lock the folder, which exists; return a sentence if another program has it."""
        if self._path in _HELD and not _is_at(_HELD[self._path], self._path):
            # The folder was deleted or renamed, and made again.
            os.close(_HELD.pop(self._path))
        # It may be held by another path, through a link.
        if is_remote(self._folder) or any(_is_at(x, self._path) for x in _HELD.values()):
            return None
        self.refusal, began = None, time.monotonic()
        told = False
        while (holder := self._try()) is not None:
            patience = _patience(holder)
            if time.monotonic() - began >= patience:
                self.refusal = self._refuse(holder)
                break
            if patience == _GRACE_SECONDS and not told:
                told = True
                _LOG.warning(
                    "%s is locked by another host, %s; waiting %d s, in case it died.",
                    self._folder,
                    holder["host"],
                    patience,
                )
            time.sleep(0.1)
        return self.refusal

    @property
    def is_claimed(self) -> bool:
        """Whether a run that has claimed the folder has not ended yet."""
        return self._claims > 0

    @contextlib.contextmanager
    def claiming(self) -> Iterator[None]:
        """Keep the lock until `end_claim`, unless what is in the block fails."""
        self._claims += 1
        try:
            yield
        except BaseException:
            self.end_claim()
            raise

    def end_claim(self) -> None:
        """Release the lock once as many claims have ended as there were."""
        self._claims = max(0, self._claims - 1)
        self.release()

    def release(self) -> None:
        """Let others write to the folder, if it is not claimed, and this has locked it."""
        if self._claims:
            return
        file, self._file = self._file, None
        if file is None or _HELD.get(self._path) != file:
            return
        with contextlib.suppress(OSError):
            if _is_at(file, self._path):
                os.unlink(self._path)
        os.close(_HELD.pop(self._path))

    def _try(self) -> dict[str, Any] | None:
        """Lock the folder once; return what is known of who has it, if another does."""
        while True:
            file = os.open(self._path, _OPEN, 0o666)
            if not _lock(file):
                holder = _read(file)
                os.close(file)
                return holder
            if _is_at(file, self._path):
                break
            os.close(file)  # Another program has released, and so removed, it.
        about = {"pid": os.getpid(), "host": platform.node()}
        about["since"] = datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # A full disk.
            os.ftruncate(file, 0)
            os.write(file, json.dumps(about).encode())
        self._file = _HELD[self._path] = file
        return None

    def _refuse(self, holder: dict[str, Any]) -> str:
        who = "another program"
        if holder:
            who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        return (
            f"{self._folder} is in use by {who}; wait until that run ends, or give this "
            "one another folder (--output)."
        )


def _patience(holder: dict[str, Any]) -> float:
    """How many seconds to wait for a lock, given who has it."""
    if not holder:
        return 1.0  # It is about to say.
    if holder["host"] != platform.node():
        return _GRACE_SECONDS
    return 0.0


def _lock(file: int) -> bool:
    """Lock a file unless another process has; where there are no locks, it is as if."""
    try:
        import fcntl  # Windows has none.

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError) as error:
        _LOG.debug("there are no locks here: %s", error)
    return True


def _is_at(file: int, path: str) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _read(file: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(os.pread(file, 4096, 0))
        if isinstance(found, dict) and {"pid", "host", "since"} <= found.keys():
            return found
    return {}


def _forget_in_child() -> None:
    """A forked process, such as a data worker, must not keep the locks of its parent."""
    for file in _HELD.values():
        os.close(file)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
