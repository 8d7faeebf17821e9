"""Paths that trackers write to, checked before the run and not at its end."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of `path`; turn the system's refusals into a sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        # For these the system says that a file exists, or the wrong name.
        files = [os.fspath(folder) for folder in path.parents if os.path.isfile(folder)]
        why = f"{files[0]!r} is a file and not a folder" if files else error.strerror
        raise ValueError(
            f"cannot write {os.fspath(path)!r}: {why}; give the path of a file "
            "in a folder that can be written to."
        ) from error
