"""The lock on a folder that one program at a time writes to."""

import contextlib
import logging
import os
import platform
import time
from datetime import datetime
from typing import Any

from ..sharding._files import is_remote, open_file

_LOG = logging.getLogger(__name__)

#: How long file servers keep the lock of a host that is gone, at most.
_GRACE_SECONDS = 120.0

#: The file in the folder. What it says is only for messages.
FILE = "lock"
_BEGINS = b"process "
#: Not through a link, which may lead to a file that is not ours to write to.
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
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
        #: How many runs have claimed the folder, and not ended yet: it stays locked.
        self.claims = 0

    def acquire(self) -> str | None:
        """Lock the folder, which exists; return a sentence if another program has it."""
        if self._path in _HELD and not _is_at(_HELD[self._path], self._path):
            # The folder was deleted or renamed, and made again.
            os.close(_HELD.pop(self._path))
        # It may be held by another path, through a link.
        if is_remote(self._folder) or any(_is_at(x, self._path) for x in _HELD.values()):
            return None
        began = time.monotonic()
        while (holder := self._try()) is not None:
            waited = time.monotonic() - began
            if not _is_elsewhere(holder) or waited > _GRACE_SECONDS:
                return (
                    f"{self._folder} is in use by {holder}; wait until that run ends, or "
                    "give this one another folder."
                )
            if waited < 1:
                words = "%s is locked by %s; waiting %d s, in case that host died."
                _LOG.warning(words, self._folder, holder, _GRACE_SECONDS)
            time.sleep(1)
        return None

    def _try(self) -> str | None:
        """Lock the folder; return what is known of who has it, if another does."""
        while True:
            file = os.open(self._path, _OPEN, 0o666)
            if not _lock(file):
                with open(file, "rb") as locked:
                    for _ in range(10):
                        if text := locked.read(200):
                            return text.decode(errors="replace")
                        time.sleep(0.1)  # It is about to say.
                return "another program"
            if _is_at(file, self._path):
                break
            os.close(file)  # Another program has released, and so removed, it.
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        # It may be empty, or zeros: that of a program that was killed just here, of a full
        # disk, or from before a loss of power.
        if not _BEGINS.startswith(os.read(file, len(_BEGINS)).rstrip(b"\0")):
            os.close(file)
            raise OSError(f"{self._path} is not a lock of eqxshard")
        with contextlib.suppress(OSError):  # A full disk.
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            text = f"{os.getpid()} on {platform.node()} since {now}"
            os.write(file, _BEGINS + text.encode())
        self._file = _HELD[self._path] = file
        return None

    def release(self) -> None:
        """Let others write to the folder, if it is not claimed, and this has locked it."""
        if self.claims or self._file is None:
            return
        if _HELD.get(self._path) == self._file:
            with contextlib.suppress(OSError):
                if _is_at(self._file, self._path):
                    os.unlink(self._path)
            os.close(_HELD.pop(self._path))
        self._file = None


def is_lock(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a lock that a program of ours has, or had when it was killed."""
    with open_file(path) as file:
        return file.read(len(_BEGINS)) == _BEGINS


def _is_elsewhere(holder: str) -> bool:
    """Whether another host has a lock: a file server may keep that of one that died."""
    _, known, host = holder.partition(" on ")
    return bool(known) and host.partition(" since ")[0] != platform.node()


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


def _forget_in_child() -> None:
    """A forked process, such as a data worker, must not keep the locks of its parent."""
    for file in _HELD.values():
        os.close(file)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
