"""Folders that are whole or do not count: a checksum of each file, written last.

The checksums are the marker that a folder is finished, on any file system: no rename of
a folder is needed for that, which object stores lack. `sha256sum -c checksums.txt` reads
them, too.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: What says that a folder is finished, and what is in it.
CHECKSUMS = "checksums.txt"


def seal(folder: Any) -> None:
    """Declare a folder finished, as it is now.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    """
    lines = [f"{digest}  {name}\n" for name, digest in sorted(_digests(folder).items())]
    part = folder / f".{CHECKSUMS}.part"
    part.write_text("".join(lines))
    part.replace(folder / CHECKSUMS)


def unseal(folder: Any) -> None:
    """Declare a folder unfinished, before it is removed, which takes a while."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def is_sealed(folder: Any) -> bool:
    """Whether a folder was finished, whatever has become of it since."""
    return (folder / CHECKSUMS).exists()


def find_damage(folder: Any) -> str | None:
    """What has changed in a folder since it was finished, in words; `None` if nothing."""
    try:
        lines = (folder / CHECKSUMS).read_text().splitlines()
        digests = (line.split("  ", 1) for line in lines)
        there = {name: digest for digest, name in digests}
    except (OSError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    try:
        found = _digests(folder)
    except OSError as error:
        return f"{error.filename or 'a file'} cannot be read: {error.strerror or error}"
    for name in sorted(there.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in there:
            return f"{name} is not in {CHECKSUMS}"
        if found[name] != there[name]:
            return f"{name} is not what was written"
    return None


def _digests(folder: Any) -> dict[str, str]:
    files = {name: file for name, file in _files(folder, "") if name != CHECKSUMS}
    # One core does a gigabyte a second.
    with ThreadPoolExecutor() as threads:
        return dict(zip(files, threads.map(_digest, files.values())))


def _files(folder: Any, prefix: str) -> list[tuple[str, Any]]:
    files = []
    for path in folder.iterdir():
        if path.is_dir():
            files += _files(path, f"{prefix}{path.name}/")
        else:
            files.append((prefix + path.name, path))
    return files


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
