"""Paths that trackers write to, checked before the run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
        raise ValueError(
            f"cannot write {os.fspath(path)!r}: {why}; use a path in a folder that can be "
            "written to."
        ) from error
