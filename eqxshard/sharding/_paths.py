"""Paths of folders and files: local ones, and the URLs of object stores."""

import os
import re
from pathlib import Path


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL, also one that `pathlib` has taken a slash from."""
    # A single letter is a drive of Windows.
    return re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)) is not None


def as_text(path: str | os.PathLike[str]) -> str:
    """A path as text, such as `gs://bucket` for `Path("gs://bucket")`."""
    return re.sub(r"^([A-Za-z][\w+.-]+):/(?!/)", r"\1://", os.fspath(path))


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path that stays the same wherever the program goes (`os.chdir`).

    **Arguments:**

    - `path`: of a folder or file, which need not exist; `~` is the home folder.
    - `what`: it is, for the error.

    **Raises:**

    `ValueError` if it is blank, or a URL.
    """
    text = as_text(path)
    if is_remote(text):
        raise ValueError(f"{what} {text!r} is a URL; give a path on this machine.")
    if not text.strip():
        raise ValueError(f"{what} {text!r} is blank; give a path.")
    return Path(os.path.abspath(os.path.expanduser(text)))
