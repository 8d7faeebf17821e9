"""The layout of a folder of checkpoints: `STEP/`, complete with `checksums.txt`.

Beside its arrays, each checkpoint has `description.json`. Here checkpoints are listed,
chosen, completed and removed, and the folder is claimed for a run.

Nothing is removed, or replaced, that we did not write: the folder and each checkpoint in
it carry a mark, and only our files are removed from a marked checkpoint. Links are read
through (an old checkpoint may lie in an archive), but never written or removed through.
"""

import contextlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal, TypeVar

from .._errors import UsageError, UsageFileError
from ..distributed import (
    assert_same_on_all_processes,
    broadcast_from_first,
    is_main_process,
)
from ..sharding._files import (
    as_text,
    is_remote,
    open_file,
    read_bytes,
    sync,
    sync_all,
    with_retries,
    writable_path,
)
from ..sharding._text import GONE, did_you_mean
from ._agree import attempt, on_all, on_first, reason, share
from ._arrays import ARRAYS, STATE, DamageError
from ._manifest import (
    CHECKSUMS,
    DESCRIPTION,
    FormatError,
    invalidate,
    is_complete,
    parse_description,
    verify,
    write_checksums,
)

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")
#: A step, the newest one, or the result of `best_step`.
Step = int | Literal["newest"] | None

#: The schemes of the URLs of object stores that checkpoints can be in.
_SCHEMES = ("s3", "gs")

#: The file that marks a folder as ours, and its text.
_MARK = "eqxshard.txt"
_MARK_TEXT = (
    "The numbered folders here are checkpoints of eqxshard, which removes old ones.\n"
)
_STEP_TEXT = "The checkpoint of step {} of eqxshard, which removes it when it is old.\n"
#: The folder of the marks that processes leave once they have written.
WRITTEN = "written"
#: All that is written in the folder of a checkpoint, besides its mark.
_OURS = (
    *(STATE, ARRAYS, WRITTEN, DESCRIPTION, CHECKSUMS, f".{CHECKSUMS}.part"),
    # Files of earlier versions, for Orbax.
    *("_CHECKPOINT_METADATA", "orbax.checkpoint"),
)
#: The files that are written below `state`: those of TensorStore, whose data files have
#: hexadecimal digits for names; and those of earlier versions, for Orbax.
_IN_STATE = re.compile(r"manifest\.ocdbt.*|[0-9a-f]{32}.*|_METADATA|_sharding")

#: The folders of checkpoints that this process is writing, by any of its checkpointers.
_BEING_WRITTEN: set[str] = set()


class CheckpointFolder:
    """A folder with a complete folder for each step that was saved.

    **Arguments:**

    - `path`: the folder, which need not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = _folder_path(path)
        #: Held from `claim` on, in process 0.
        self.lock = FolderLock(self.path)
        #: The steps whose checkpoints were found damaged, and how they are damaged.
        self.damaged: dict[int, str] = {}
        self.claimed = False
        #: The entry of this folder in `_BEING_WRITTEN`.
        self._written = ""
        #: The steps that were there when the folder was last listed.
        self._listed: list[int] = []

    def at(self, step: int) -> Any:
        """The folder of a step."""
        return self.path / str(step)

    def name(self, step: int) -> str:
        """The name of the checkpoint of a step in messages."""
        return f"the checkpoint of step {step} in {self.path}"

    def steps(self) -> list[int]:
        """The steps with complete checkpoints, in order."""
        try:
            return with_retries(self._list_steps)
        except NotADirectoryError:
            raise UsageError(
                f"{self.path} is a file, not a folder; give the checkpoints a folder."
            ) from None
        # Not only OSError: packages for object stores have errors of their own.
        except Exception as error:
            raise OSError(
                f"{self.path} cannot be listed ({reason(error)}); check the address, the "
                "credentials and the network."
            ) from error

    def own_steps(self) -> list[int]:
        """The steps whose checkpoints may be removed."""
        return [step for step in self.steps() if self._is_ours(step)]

    def good_steps(self) -> list[int]:
        """The steps whose checkpoints were not found damaged."""
        return [step for step in self.steps() if step not in self.damaged]

    def known_steps(self) -> list[int]:
        """As `good_steps`; if the folder cannot be listed now, as it was listed last."""
        # Not only OSError: packages for object stores have errors of their own.
        with contextlib.suppress(Exception):
            self._list_steps()
        return [step for step in self._listed if step not in self.damaged]

    def _list_steps(self) -> list[int]:
        folders = [path for path in _entries(self.path) if _is_step(path.name)]
        self._listed = sorted(int(path.name) for path in folders if is_complete(path))
        return self._listed

    def description(self, step: int) -> dict[str, Any]:
        """The description of a checkpoint, whose other files are not verified.

        Raises `ValueError` if it is damaged, or another error if it cannot be read.
        """
        description = parse_description(read_bytes(self.at(step) / DESCRIPTION))
        if description["step"] != step:
            raise UsageError(
                f"{DESCRIPTION} says step {description['step']}, so the folder was renamed "
                "or copied"
            )
        return description

    def choose(self, step: Step) -> dict[str, Any]:
        """Verify the checkpoint of a step; or find the newest that is not damaged.

        Process 0 looks, for all processes. Returns the checkpoint's description.
        """
        outcome = attempt(lambda: self._find(step)) if is_main_process() else None
        self.damaged = dict(broadcast_from_first([*self.damaged.items()]))
        return share(outcome).get()

    def read(self, step: int, read: Callable[[], _T]) -> _T | None:
        """Call a function that reads a checkpoint; `None` if any process found damage."""
        try:
            return on_all(read)
        except DamageError as error:
            self.damaged[step] = str(error)
            return None
        except OSError as error:
            raise self._unread(error) from error

    def _unread(self, error: Exception) -> OSError:
        return OSError(
            f"the checkpoints in {self.path} cannot be read ({reason(error)}), which does "
            "not mean that they are damaged; try again, or move the newest away to use the "
            "one before it."
        )

    def _find(self, step: Step) -> dict[str, Any]:
        """As `choose`, in process 0; adds the steps that it finds damaged to `damaged`."""
        steps, damages = self.steps(), {}
        for candidate in [each for each in reversed(steps) if step in ("newest", each)]:
            try:
                if candidate in self.damaged:
                    raise DamageError(self.damaged[candidate])
                verify(self.at(candidate))
                return self.description(candidate)
            except FormatError as error:
                raise UsageError(
                    f"{self.name(candidate)} cannot be read: {error}"
                ) from None
            except (FileNotFoundError, ValueError) as error:
                damages[candidate] = self.damaged[candidate] = str(error)
            # Not only OSError: packages for object stores have errors of their own.
            except Exception as error:
                raise self._unread(error) from error
            if step == "newest":
                said = self.name(candidate), damages[candidate]
                _LOG.warning("%s is damaged (%s); using the one before it.", *said)
        others = [other for other in steps if other not in self.damaged]
        use = f"use one of: {listed(others)}" if others else "use another folder"
        kind = "good checkpoint" if damages else "checkpoint"
        of = "" if step == "newest" else f" of step {step}"
        why = "".join(f" (step {each}: {damage})" for each, damage in damages.items())
        raise (UsageError if damages else UsageFileError)(
            f"there is no {kind}{of} in {self.path}{why}; {use}."
        )

    def complete(self, description: dict[str, Any]) -> None:
        """Complete a checkpoint whose arrays are written.

        From then on a loss of power leaves it whole, so older ones may be removed.
        """
        folder = self.at(description["step"])
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
        if not is_remote(folder):
            sync_all(folder)
        write_checksums(folder)
        if not is_remote(folder):
            sync(self.path)
        self.end()

    def claim_from(self, step: int) -> None:
        """Claim the folder for a run that starts from a step, or raise `ValueError`."""
        on_first(self.claim)
        # If hosts do not share the folder, each sees different checkpoints.
        assert_same_on_all_processes("run", {"checkpoints": self.steps()})
        steps = self.good_steps()
        if steps and steps[-1] > step:
            raise UsageError(
                f"{self.path} has a checkpoint of step {steps[-1]}, and the run starts "
                f"from step {step}; restore that one to go on, or give the run another "
                "directory."
            )

    def claim(self) -> None:
        """Make the folder ours, and lock it; raise `UsageError` if that fails."""
        try:
            if not is_claimed(self.path):
                foreign = [path.name for path in _entries(self.path) if self._is_odd(path)]
                if foreign:
                    raise UsageError(
                        f"{self.path} has {min(foreign)!r}, which eqxshard did not "
                        "write; give the run a folder of its own."
                    )
                if self.claimed:
                    _LOG.warning(GONE, self.path, "its checkpoints")
                _mark(self.path, _MARK_TEXT)
                # The folder, and those above it, may be new.
                for each in () if is_remote(self.path) else self.path.parents:
                    sync(each)
            # Half-written checkpoints of another program are not ours to remove.
            self.claimed = self.lock.acquire()
            if not self.claimed:
                raise UsageError(
                    f"{self.path} is in use by {self.lock.holder}; wait until that run "
                    "ends, or give this one another folder."
                )
        except UsageError:
            raise
        # Not only OSError: packages for object stores have errors of their own.
        except Exception as error:
            raise UsageError(
                f"checkpoints cannot be written to {self.path}: {reason(error)}; give a "
                "folder that can be written to."
            ) from error

    def _is_odd(self, path: Any) -> bool:
        """True if something in a folder without our mark has one of our names."""
        if _is_step(path.name):
            return not (is_complete(path) or self._is_ours(int(path.name)))
        if path.name == _LOCK and not is_remote(path):
            return os.path.islink(path) or not _is_lock(path)
        return path.name == _MARK

    def _is_ours(self, step: int) -> bool:
        """True if the folder of a step is marked as a checkpoint of ours."""
        folder = self.at(step)
        return not os.path.islink(folder) and _has_mark(folder, _STEP_TEXT.format(step))

    def make(self, step: int) -> None:
        """Make a folder for a step; one of ours that is there is removed.

        It is left alone until `complete` or `end`. Raises `OSError` if something else is
        there.
        """
        folder = self.at(step)
        written = os.fspath(folder) if is_remote(folder) else os.path.realpath(folder)
        if written in _BEING_WRITTEN:
            raise OSError(f"{folder} is being written already; wait for that save")
        if self._is_ours(step):
            # Other files in it may stay, but not under the names of ours.
            names = [path.name for path in folder.iterdir() if os.path.islink(path)]
            is_taken = not {*names}.isdisjoint(_OURS)
        else:
            odd = os.path.islink(folder) or os.path.isfile(folder)
            is_taken = odd or bool(_entries(folder))
        if is_taken:
            raise OSError(
                f"{folder} is not a checkpoint of this run; move it away, or give the run "
                "a folder of its own"
            )
        self.remove(step)
        self._written = written
        _BEING_WRITTEN.add(written)
        _mark(folder, _STEP_TEXT.format(step))

    def end(self) -> None:
        """Let the folder that was made last be removed: nothing is written to it now."""
        _BEING_WRITTEN.discard(self._written)

    def remove(self, step: int) -> None:
        """Remove the checkpoint of a step, if there is one of ours."""
        if self._is_ours(step):
            invalidate(self.at(step))
            _remove(self.at(step))

    def clean(self) -> None:
        """Remove checkpoints whose writing was interrupted."""
        for path in self.path.iterdir():
            at = os.fspath(path) if is_remote(path) else os.path.realpath(path)
            is_left = _is_step(path.name) and at not in _BEING_WRITTEN
            if is_left and not is_complete(path):
                self.remove(int(path.name))


def is_claimed(path: Any) -> bool:
    """True if a folder is marked as one of checkpoints."""
    return _has_mark(path, _MARK_TEXT)


def _folder_path(path: str | os.PathLike[str]) -> Any:
    """A folder, local or not, as an `etils.epath.Path`."""
    # Imported late: it takes a while, and not every run needs it.
    from etils import epath

    if not is_remote(path):
        local = writable_path(path, "the folder of checkpoints")
        if os.sep == "/" and "\\" in os.fspath(local):
            raise UsageError(
                f"the folder of checkpoints, {os.fspath(local)!r}, has a backslash, which "
                "TensorStore takes for a slash; give another name."
            )
        return epath.Path(local)
    import fsspec
    from fsspec.config import conf

    path = as_text(path)
    scheme = path.partition("://")[0]
    if scheme not in _SCHEMES:
        raise UsageError(
            f"checkpoints cannot be written to {path!r}; use a local folder, or s3:// or "
            "gs://, with s3fs or gcsfs installed."
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise UsageError(
            f"{path!r} cannot be reached ({error}); use a local folder, or install the "
            "package that this names."
        ) from error

    # With its cache, fsspec would not see what other processes and TensorStore write.
    for protocol in ("s3", "gcs"):
        conf.setdefault(protocol, {})["use_listings_cache"] = False
    return epath.Path(path)


def listed(steps: list[int]) -> str:
    """Steps for a message: `step 100, step 200`."""
    return ", ".join(f"step {step}" for step in steps) or "none"


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _entries(folder: Any) -> list[Any]:
    """The entries of a folder; none if it does not exist."""
    # Not `exists`, which takes an error of the file system for absence.
    try:
        return [*folder.iterdir()]
    except FileNotFoundError:
        return []


def _has_mark(folder: Any, text: str) -> bool:
    """True if a folder has a mark, or what a full disk or a loss of power left of it."""
    mark = folder / _MARK
    if os.path.islink(mark):
        return False
    try:
        return text.encode().startswith(read_bytes(mark).rstrip(b"\0"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _mark(folder: Any, text: str) -> None:
    """Make a folder, unless it is there, and mark it."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_remote(folder):
        (folder / _MARK).write_text(text)
        return
    # Nothing is replaced; another program may have written it in this moment.
    try:
        with open(folder / _MARK, "x") as file:
            file.write(text)
    except FileExistsError:
        if not _has_mark(folder, text):
            raise
    # Before anything else is written there: without the mark, nothing can be removed.
    sync(folder / _MARK)
    sync(folder)


def _remove(folder: Any) -> None:
    """Remove our files in a checkpoint's folder, and the folder if no others are left."""
    for path in [*folder.iterdir()]:
        if path.name not in _OURS or os.path.islink(path):
            continue
        if path.name == STATE and path.is_dir():
            _remove_state(path)
        elif path.is_dir():
            path.rmtree(missing_ok=True)
        else:
            path.unlink(missing_ok=True)
    if not is_remote(folder):
        sync(folder)
    # The mark goes last: if this is interrupted, the rest can still be removed.
    (folder / _MARK).unlink(missing_ok=True)
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _remove_state(folder: Any) -> None:
    """Remove TensorStore's files below a folder, and folders that are empty then."""
    for path in [*folder.iterdir()]:
        if os.path.islink(path):
            continue
        if path.is_dir():
            _remove_state(path)
        elif _IN_STATE.fullmatch(path.name):
            path.unlink(missing_ok=True)
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


# One program at a time

#: The longest that file servers keep the lock of a host that is gone.
_GRACE_SECONDS = 120.0

#: The file in the folder that is locked. Its text is only for messages.
_LOCK = "lock"
_BEGINS = b"process "
#: A link is not followed, since it may lead to a file that is not ours to write to.
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
#: The locked files of this process. The system unlocks them when it ends, however it ends.
_HELD: dict[str, int] = {}


class FolderLock:
    """Keeps other programs from writing to a folder.

    All objects for a folder in this process share one lock. Object stores, and file systems
    without locks, are left unlocked.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    """

    def __init__(self, folder: Any):
        self._folder = folder
        self._path = os.path.join(folder, _LOCK)
        self._file: int | None = None
        #: How many runs have claimed the folder, and not ended yet: it stays locked.
        self.claims = 0
        #: What is known of the program that had the folder when it was last tried.
        self.holder: str | None = None

    def acquire(self) -> bool:
        """Lock the folder, which must exist; return false if another program has it.

        Then `holder` says what is known of that program.
        """
        if self._path in _HELD and not _is_at(_HELD[self._path], self._path):
            # The folder was deleted or renamed, and made again.
            os.close(_HELD.pop(self._path))
        # This process may hold it by another path, through a link.
        if is_remote(self._folder) or any(_is_at(x, self._path) for x in _HELD.values()):
            return True
        began = time.monotonic()
        while (holder := self._try()) is not None:
            self.holder = holder
            waited = time.monotonic() - began
            if not _is_elsewhere(holder) or waited > _GRACE_SECONDS:
                return False
            if waited < 1:
                words = "%s is locked by %s; waiting %d s, in case that host died."
                _LOG.warning(words, self._folder, holder, _GRACE_SECONDS)
            time.sleep(1)
        return True

    def _try(self) -> str | None:
        """Lock the folder; if another program has it, return what is known of that."""
        while True:
            file = os.open(self._path, _OPEN, 0o666)
            if not _lock(file):
                with open(file, "rb") as locked:
                    for _ in range(10):
                        if text := locked.read(200):
                            return text.decode(errors="replace")
                        time.sleep(0.1)  # That program is about to write its name.
                return "another program"
            if _is_at(file, self._path):
                break
            os.close(file)  # Another program has released the lock, and removed the file.
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        # The file may be empty, or zeros, after a program was killed just here, on a full
        # disk, or after a loss of power.
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
        """Let others write to the folder, if no run claims it and this has locked it."""
        if self.claims or self._file is None:
            return
        if _HELD.get(self._path) == self._file:
            with contextlib.suppress(OSError):
                if _is_at(self._file, self._path):
                    os.unlink(self._path)
            os.close(_HELD.pop(self._path))
        self._file = None


def _is_lock(path: str | os.PathLike[str]) -> bool:
    """True if a file is a lock that a program of ours has, or had when it was killed."""
    with open_file(path) as file:
        return file.read(len(_BEGINS)) == _BEGINS


def _is_elsewhere(holder: str) -> bool:
    """True if another host has a lock: a file server may keep that of one that died."""
    _, known, host = holder.partition(" on ")
    return bool(known) and host.partition(" since ")[0] != platform.node()


def _lock(file: int) -> bool:
    """Lock a file; false if another process has. Without locks here, always true."""
    try:
        import fcntl  # Windows has none.

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ImportError) as error:
        _LOG.debug("there are no locks here: %s", error)
    return True


def _is_at(file: int, path: str) -> bool:
    """True if an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    """Close the locks of the parent in a forked process, such as a data worker."""
    for file in _HELD.values():
        os.close(file)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


# The best

Mode = Literal["min", "max"]

#: The last words of metrics that everybody wants small, or large.
_SMALL, _LARGE = ("loss", "error", "perplexity"), ("accuracy", "acc")


def best_mode(metric: str, mode: Mode | None) -> Mode:
    """The mode that was given for a metric, or the one that its name tells.

    **Raises:**

    `ValueError` if the mode is unknown, or missing where the name does not tell.
    """
    if mode in ("min", "max"):
        return mode
    if mode is not None:
        raise UsageError(f"mode={mode!r} is not a mode; use 'min' or 'max'.")
    word = re.split(r"[^a-z]+", metric.lower())[-1]
    if word in _SMALL:
        return "min"
    if word in _LARGE:
        return "max"
    hint = did_you_mean(word, (*_SMALL, *_LARGE), 0.75)
    hint = hint.replace("'", f"'{metric.removesuffix(word)}", 1)
    say = f"{hint}Otherwise say" if hint else "say"
    raise UsageError(
        f"the name {metric} leaves open whether small or large is best; {say} mode='min' "
        "or mode='max'."
    )


def best_of(values: Mapping[int, float], mode: Mode) -> int | None:
    """The step with the best value, the first of equals; `None` if there are no values."""
    sign = 1 if mode == "max" else -1
    return max(values, key=lambda step: (sign * values[step], -step), default=None)
