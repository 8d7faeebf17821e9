"""Files that were made to do harm: they run code, never end, or lead elsewhere."""

import os
import pickle
import subprocess
from pathlib import Path

#: Kinds of things that a folder of plain files must not have.
FORBIDDEN = ("fifo", "device", "loop", "outside", "parent")


def forbid(path: Path, kind: str) -> None:
    """Put a thing of `FORBIDDEN` at a path."""
    if kind == "fifo":
        os.mkfifo(path)
    else:
        targets = {"device": "/dev/zero", "loop": path, "outside": __file__, "parent": ".."}
        os.symlink(targets[kind], path)


def deep_json(depth: int = 100_000) -> str:
    """Lists in lists."""
    return "[" * depth + "]" * depth


class HostilePickle:
    """A pickle that leaves a file behind when something unpickles it.

    **Arguments:**

    - `folder`: the folder of that file.
    """

    def __init__(self, folder: Path):
        self._trace = folder / "it-ran"
        self.content = pickle.dumps(_Call(self._trace))

    def has_run(self) -> bool:
        """True if something has unpickled it."""
        return self._trace.exists()


class _Call:
    def __init__(self, trace: Path):
        self._trace = trace

    def __reduce__(self):
        return subprocess.check_call, (["touch", str(self._trace)],)
