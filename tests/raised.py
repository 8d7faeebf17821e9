"""Record what tests expect to be raised, for the page of errors: `nox -s errors`."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

_ROOT = str(Path(__file__).parent.parent)
#: Folders that tests make, up to the part that a reader would have.
_FOLDERS = re.compile(r"/[\w/.-]*?/pytest-of-\w+/pytest-\d+(/popen-gw\d+)?/[^/\s]+?\d+/")
#: What is of this machine, or of this run.
_OURS = re.compile(r"/tmp/|/home/|/root/|pytest| at 0x|\bpid \d|<locals>")


def record(path: str) -> None:
    """Have `pytest.raises` append the messages of errors of ours to a file, as JSON."""
    expected: Any = pytest.RaisesExc
    leave = expected.__exit__

    def leave_and_record(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        if error is not None and _is_ours(traceback):
            message = _FOLDERS.sub("", str(error))
            if len(message) < 400 and not _OURS.search(message) and _ROOT not in message:
                # A test may be of a disk that is full.
                with contextlib.suppress(OSError), Path(path).open("a") as file:
                    file.write(json.dumps(message) + "\n")
        return leave(self, kind, error, traceback)

    expected.__exit__ = leave_and_record


def _is_ours(traceback: Any) -> bool:
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename.startswith(f"{_ROOT}/eqxshard/")
