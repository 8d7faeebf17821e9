"""Pickles that run code when they are read, and whether they did."""

import pickle
import subprocess
from pathlib import Path


class HostilePickle:
    """A pickle that leaves a file behind when something unpickles it.

    **Arguments:**

    - `folder`: of the file that it leaves.
    """

    def __init__(self, folder: Path):
        self._trace = folder / "it-ran"
        self.content = pickle.dumps(_Call(self._trace))

    def has_run(self) -> bool:
        """Whether something has unpickled it."""
        return self._trace.exists()


class _Call:
    def __init__(self, trace: Path):
        self._trace = trace

    def __reduce__(self):
        return subprocess.check_call, (["touch", str(self._trace)],)
