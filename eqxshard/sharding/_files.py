"""Paths of local files and object stores, safe writes, and reads of untrusted files.

A file that somebody else made may be a FIFO that never answers, a link to a device that
never ends, larger than the memory, or JSON that nests deeper than Python can follow. Paths
in object stores are URLs.
"""

import errno
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .._errors import UsageError

_T = TypeVar("_T")

#: The most bytes in a name, and in a path, which leaves room for names of ours below it.
_LONGEST_NAME, _LONGEST_PATH = 255, 3840
#: The largest file that is read into memory in one piece.
_MOST_BYTES = 2**30
#: How many seconds to wait before each retry of a failed read.
_WAITS = (0.5, 2.0, 5.0)
#: The errors of file systems that cannot sync a file or a folder.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EROFS)
#: How deep JSON may nest. Ours nests less than 10 deep.
_MOST_DEPTH = 100


def is_remote(path: str | os.PathLike[str]) -> bool:
    """True if a path is a URL, even one that has lost a slash in `pathlib`."""
    # A single letter is a drive of Windows.
    return re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)) is not None


def as_text(path: str | os.PathLike[str]) -> str:
    """A path as text, such as `gs://bucket` for `Path("gs://bucket")`."""
    return re.sub(r"^([A-Za-z][\w+.-]+):/(?!/)", r"\1://", os.fspath(path))


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """An absolute path, which stays the same after `os.chdir`.

    **Arguments:**

    - `path`: of a folder or file, which need not exist; `~` is the home folder.
    - `what`: what errors call the path, such as `the folder`.

    **Raises:**

    `ValueError` if it is blank, a URL, or longer than file systems take.
    """
    text = as_text(path)
    if is_remote(text):
        raise UsageError(f"{what} {text!r} is a URL; give a path on this machine.")
    if not text.strip():
        raise UsageError(f"{what} {text!r} is blank; give a path.")
    path = Path(os.path.abspath(os.path.expanduser(text)))
    longest = max(len(os.fsencode(name)) for name in path.parts)
    whole = len(os.fsencode(path))
    if longest > _LONGEST_NAME or whole > _LONGEST_PATH:
        raise UsageError(
            f"{what} {text[:40]!r}... is too long: {longest:,} bytes in one name, and "
            f"{whole:,} in all, of {_LONGEST_NAME} and {_LONGEST_PATH:,}; give a shorter "
            "path."
        )
    return path


def writable_path(path: str | os.PathLike[str], what: str) -> Path:
    """As `local_path`, for a path that libraries write to, some of which need UTF-8.

    **Raises:**

    `ValueError` also if it has characters that the locale's encoding or UTF-8 lacks.
    """
    try:
        found = local_path(path, what)
        for encoding in (sys.getfilesystemencoding(), "utf-8"):
            os.fspath(found).encode(encoding)
    except UnicodeEncodeError:
        raise UsageError(
            f"{what}, {os.path.abspath(as_text(path))!a}, has characters that cannot be "
            f"written here, where names are in {sys.getfilesystemencoding()}; set "
            "LC_ALL=C.UTF-8, or give another name."
        ) from None
    return found


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes; links to it are followed.

    **Raises:**

    `OSError` if it cannot be opened, `ValueError` if it is a FIFO, a device or a folder.
    """
    # Opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{os.fspath(path)!r} is not a regular file; give one that is.")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Any) -> bytes:
    """The bytes of a file; `ValueError` also if it is too large."""
    if is_remote(path):
        return path.read_bytes()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise UsageError(
                f"{os.fspath(path)!r} has {size:,} bytes, too many for a file of its kind; "
                "give another one."
            )
        return file.read()


def write_at_once(path: Any, text: str) -> None:
    """Write a file that nobody sees half written, even after a loss of power.

    **Arguments:**

    - `path`: an `etils.epath.Path`.
    - `text`: the content.
    """
    if is_remote(path):
        # Objects appear whole, and some stores cannot rename them.
        path.write_text(text)
        return
    part = path.parent / f".{path.name}.part"
    part.write_text(text)
    sync(part)
    part.replace(path)
    sync(path.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file, or the list of a folder's files, is on the disk.

    Without that, they can be lost when the power fails. Links are left alone.
    """
    try:
        # Follow no link, and do not wait for the writer of a FIFO.
        flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        # Windows does not open folders, and we may have no access to those above ours.
        if isinstance(error, PermissionError) or os.path.islink(path):
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_all(folder: str | os.PathLike[str]) -> None:
    """As `sync`, for a folder and everything in it."""
    for top, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(os.path.join(top, name))
        sync(top)


def with_retries(read: Callable[[], _T]) -> _T:
    """Call a function that reads; call it again after an error that may be temporary.

    Network file systems and object stores fail for seconds at a time. An error that
    something does not exist, may not be read, or is not what it should be (`ValueError`),
    is final.
    """
    for seconds in _WAITS:
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            raise
        # Not only OSError: packages for object stores raise errors of their own.
        except Exception:
            time.sleep(seconds)
    return read()


def read_json(path: Any) -> Any:
    """The values in a JSON file; `ValueError` also if it is not JSON."""
    data = read_bytes(path)
    try:
        return parse_json(data)
    except ValueError as error:
        raise UsageError(
            f"{os.fspath(path)!r} is not JSON ({error}); it is damaged, or another file."
        ) from None


def parse_json(text: str | bytes) -> Any:
    """The values in a JSON text; `ValueError` if it is not JSON, or nests too deep."""
    try:
        values = json.loads(text)
    except RecursionError:
        raise UsageError("it nests too deep") from None
    level = [values]
    for _ in range(_MOST_DEPTH):
        level = [part for node in level for part in _children(node)]
    if level:
        raise UsageError("it nests too deep")
    return values


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def odd_file(folder: str | os.PathLike[str]) -> str | None:
    """A phrase that names something in a folder that is neither a file nor a folder.

    `None` if there is nothing like that. Links are not followed: what they point to is not
    a part of the folder.
    """
    folders = [] if is_remote(folder) else [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    return f"{entry.path} is not a regular file"
    return None
