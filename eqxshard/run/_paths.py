"""The folder of a run: where it is, and the paths of its files."""

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from ..sharding._files import read_json, writable_path


class RunPaths:
    """The paths of the files of a run; [`eqxshard.run.RunFolder`][] lists them.

    - `files`: the files that a run replaces; the checkpoints are in a folder beside them.

    **Arguments:**

    - `path`: the folder, which need not exist yet.

    **Raises:**

    `ValueError` if it is the URL of an object store, or has a name that cannot be written
    here.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = writable_path(path, "the folder of a run")
        self.checkpoints = self.path / "checkpoints"
        self.files: list[Path] = []
        self.metrics = self._file("metrics.jsonl")
        self.curves = self._file("curves.png")
        self.summary = self._file("summary.json")
        self.page = self._file("index.html")
        self.record = self._file("run.json")
        self.warnings = self._file("warnings.jsonl")

    def _file(self, name: str) -> Path:
        self.files.append(self.path / name)
        return self.files[-1]


def script_name() -> str:
    """The name of the script that runs; empty in a notebook or another session."""
    # In a notebook, sys.argv names the script that starts the kernel.
    is_script = hasattr(sys.modules["__main__"], "__file__")
    return Path(sys.argv[0]).stem if is_script else ""


def default_folder(name: str | None) -> str:
    """The default folder of a run of this script, such as `runs/gpt-small`."""
    # A slash would make a folder in a folder.
    words = [script_name(), *re.split(r"[\s/\\]+", (name or "").lower())]
    return f"runs/{'-'.join(filter(None, words)) or 'run'}"


def read_values(path: Path) -> dict[str, Any]:
    """The values in a JSON file; empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        if isinstance(found, dict):
            return found
    return {}
