"""Folders that are complete or do not count: a list of their files, written last.

The list marks a folder as complete on any file system. (Renaming a finished folder would
not do on object stores, which cannot rename.) It has the SHA-256 of each file, which
`sha256sum -c checksums.txt` verifies, too. Large files of arrays, whose chunks carry
checksums of their own, are listed by size: each process verifies what it reads of them.
"""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..sharding._files import (
    is_remote,
    odd_file,
    read_bytes,
    sync,
    with_retries,
    write_at_once,
)

#: The file that marks a folder as complete, with a line for every other file.
CHECKSUMS = "checksums.txt"
#: The files that TensorStore verifies: chunks in an object store, or of a process.
_VERIFIED_WHEN_READ = re.compile(r"arrays/|state/ocdbt\.process_\d+_crc32c\w*/d/")
#: Those that are no larger are hashed nevertheless.
_SMALL_BYTES = 2**20


def write_checksums(folder: Any) -> None:
    """Mark a folder as complete, as it is now.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    """
    marks = _mark(_files(folder))
    lines = [f"{mark}  {name}\n" for name, mark in sorted(marks.items())]
    # A list that was cut short would say less, and nothing wrong.
    write_at_once(folder / CHECKSUMS, "".join([f"# {len(lines)} files\n", *lines]))


def invalidate(folder: Any) -> None:
    """Mark a folder as incomplete, before removing it, which takes a while."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    if not is_remote(folder):
        # A loss of power could undo this, and not what is removed next.
        sync(folder)


def is_complete(folder: Any) -> bool:
    """Whether a folder was completed, whatever has happened to it since."""
    # Not `exists`, which takes an error of the file system for absence.
    try:
        return any(path.name == CHECKSUMS for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def verify(folder: Any) -> str | None:
    """A sentence on how a folder differs from when it was completed; `None` if equal.

    Of large files of arrays, the sizes; their chunks are verified when they are read.
    Files that were added do not count, such as notes of the user's. What cannot be read
    is tried again, and is then an error, not a difference.
    """
    if (odd := with_retries(partial(odd_file, folder))) is not None:
        return odd
    try:
        written = _parse(with_retries(partial(read_bytes, folder / CHECKSUMS)).decode())
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except ValueError:
        return f"{CHECKSUMS} is not a list of checksums"
    files = with_retries(partial(_files, folder))
    found = _mark({k: v for k, v in files.items() if k in written}, written)
    for name in sorted(written):
        if name not in found:
            return f"{name} is missing"
        if found[name] != written[name]:
            return f"{name} has changed since it was written"
    return None


def _parse(text: str) -> dict[str, str]:
    """What a list says of each file; `ValueError` if it is not a whole list."""
    # Those of earlier versions do not begin with the number of files.
    count = re.match(r"# (\d+) files\n", text)
    marks = (
        line.split("  ", 1) for line in text[count.end() if count else 0 :].splitlines()
    )
    written = {name: mark for mark, name in marks}
    if not written or (count and int(count[1]) != len(written)):
        raise ValueError
    return written


def _mark(files: Mapping[str, Any], written: Mapping[str, str] = {}) -> dict[str, str]:
    """What the list says of each file: its digest, or `#` and its size.

    **Arguments:**

    - `files`: by name.
    - `written`: what the list says already.
    """
    # One core does a gigabyte a second.
    with ThreadPoolExecutor() as threads:
        reads = (
            partial(with_retries, partial(_mark_of, name, file, written.get(name, "#")))
            for name, file in files.items()
        )
        return dict(zip(files, threads.map(lambda read: read(), reads)))


def _mark_of(name: str, file: Any, written: str) -> str:
    # What was hashed is hashed again. For sha256sum, the other lines are comments.
    if written.startswith("#") and _VERIFIED_WHEN_READ.match(name):
        size = file.stat().length
        if size > _SMALL_BYTES:
            return f"#{size}"
    return _digest(file)


def _files(folder: Any, prefix: str = "") -> dict[str, Any]:
    """By name, every file but that of the checksums."""
    files: dict[str, Any] = {}
    for path in folder.iterdir():
        name = prefix + path.name
        if path.is_dir():
            files |= _files(path, f"{name}/")
        elif name != CHECKSUMS:
            files[name] = path
    return files


def _digest(file: Any) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
