"""Folders that are complete or do not count: a checksum of each file, written last.

The file of checksums marks a folder as complete on any file system. (Renaming a finished
folder would not do on object stores, which cannot rename.) `sha256sum -c checksums.txt`
verifies it, too.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..sharding._files import is_remote, odd_file, read_bytes, with_retries

#: The file that marks a folder as complete, with the checksum of every other file.
CHECKSUMS = "checksums.txt"


def write_checksums(folder: Any) -> None:
    """Mark a folder as complete, as it is now.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    """
    digests = _digests(_files(folder))
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    if is_remote(folder):
        # Objects appear whole, and some stores cannot rename them.
        (folder / CHECKSUMS).write_text(text)
        return
    part = folder / f".{CHECKSUMS}.part"
    part.write_text(text)
    part.replace(folder / CHECKSUMS)


def invalidate(folder: Any) -> None:
    """Mark a folder as incomplete, before removing it, which takes a while."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def is_complete(folder: Any) -> bool:
    """Whether a folder was completed, whatever has happened to it since."""
    # Not `exists`, which takes an error of the file system for absence.
    try:
        return any(path.name == CHECKSUMS for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def verify(folder: Any) -> str | None:
    """A sentence on how a folder differs from when it was completed; `None` if equal.

    Hidden files that were added do not count, such as the `.DS_Store` of macOS. What
    cannot be read is tried again, and is then an error, not a difference.
    """
    if (odd := with_retries(partial(odd_file, folder))) is not None:
        return odd
    try:
        lines = with_retries(partial(read_bytes, folder / CHECKSUMS)).decode().splitlines()
        digests = (line.split("  ", 1) for line in lines)
        written = {name: digest for digest, name in digests}
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except ValueError:
        return f"{CHECKSUMS} is not a list of checksums"
    files = with_retries(partial(_files, folder))
    found = _digests({k: v for k, v in files.items() if k in written or not _hidden(k)})
    for name in sorted(written.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in written:
            return f"{name} is not in {CHECKSUMS}"
        if found[name] != written[name]:
            return f"{name} has changed since it was written"
    return None


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _digests(files: Mapping[str, Any]) -> dict[str, str]:
    # One core does a gigabyte a second.
    with ThreadPoolExecutor() as threads:
        reads = (partial(with_retries, partial(_digest, file)) for file in files.values())
        return dict(zip(files, threads.map(lambda read: read(), reads)))


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
