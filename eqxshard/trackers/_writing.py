"""Files that trackers write: checked before the run, whole, and not too often."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .._errors import UsageError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the folder of a path; raise `ValueError` if the path cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        # The system's own message would be that a file exists, or give another path.
        files = [os.fspath(folder) for folder in path.parents if os.path.isfile(folder)]
        why = f"{files[0]!r} is a file and not a folder" if files else error.strerror
        raise UsageError(
            f"cannot write {os.fspath(path)!r}: {why}; use a path in a folder that can be "
            "written to."
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file such that it is never seen half written, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class Seldom:
    """Calls a function unless that would take more than a part of the time.

    **Arguments:**

    - `part`: of the time: 100 for a hundredth.
    """

    def __init__(self, part: int):
        self._part = part
        self._next = 0.0

    def call(self, fn: Callable[[], object]) -> None:
        """Call a function, if the last call is long enough ago."""
        start = time.monotonic()
        if start >= self._next:
            fn()
            end = time.monotonic()
            self._next = end + self._part * (end - start)
