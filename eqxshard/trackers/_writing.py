"""Writing trackers' files: checked before the run, replaced whole, and not too often."""

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
        # The system's message would say that a file exists, or name another path.
        files = [os.fspath(folder) for folder in path.parents if os.path.isfile(folder)]
        why = f"{files[0]!r} is a file and not a folder" if files else error.strerror
        raise UsageError(
            f"cannot write {os.fspath(path)!r}: {why}; use a path in a folder that can be "
            "written to."
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically. Its folder is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class Seldom:
    """Limits a function to `1 / part` of the wall time.

    **Arguments:**

    - `part`: 100 for a hundredth of the time.
    """

    def __init__(self, part: int):
        self._part = part
        self._next = 0.0

    def call(self, fn: Callable[[], object]) -> None:
        """Call the function, unless the last call was too recent."""
        start = time.monotonic()
        if start >= self._next:
            fn()
            end = time.monotonic()
            self._next = end + self._part * (end - start)
