"""Metrics as lines of JSON."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .._errors import UsageError
from ..distributed import is_main_process
from ..sharding._files import local_path, open_file, parse_json
from ._metrics import Value, numbers
from ._writing import write_whole, writing

_LOG = logging.getLogger(__name__)

#: The most lines that wait for a file that cannot be written.
_MOST_WAITING = 10_000
#: No float is larger than this integer.
_TOO_LARGE = 2**1024
#: Lines that `JSONLines` writes have fewer bytes.
_LONGEST_LINE = 2**22


class JSONLines:
    """Writes each report as one line of JSON, readable during the run.

    A line is `{"step": 50, "epoch": 0.21, "train/loss": 0.83, ...}`. It is in the file
    when `log` returns, so the file of a killed run is complete. Values that are not
    finite are `null`, because JSON has no nan or infinity. If the disk is full, up to
    10,000 lines wait until there is room. If the file is deleted or renamed during the
    run, it is written again. With several processes, only process 0 writes.

    - `waiting`: the lines that are not in the file yet.

    **Arguments:**

    - `path`: the file to write. Its folder is created if necessary.
    - `keep_until`: keep the lines of an earlier run up to this step, and drop the later
        ones: a resumed run takes those steps again. By default, no line is kept.
    - `extra`: entries to add to every line, such as `{"data": "synthetic"}`. Values that
        are logged under the same name take precedence.

    **Raises:**

    `ValueError` if the file cannot be written; from `log`, if it is closed. `TypeError` or
    `ValueError` if JSON cannot write the values of `extra`.

    !!! Example

        ```python
        tracker = eqxshard.trackers.JSONLines("runs/metrics.jsonl", extra={"seed": 0})
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_until: int | None = None,
        extra: Mapping[str, object] = {},
    ):
        self._extra = json.loads(json.dumps(dict(extra), allow_nan=False))
        self._path = local_path(path, "the file")
        self.waiting: list[str] = []
        self._drops = False
        if not is_main_process():
            return
        with writing(self._path):
            if keep_until is not None and self._path.exists():
                whole = read_whole_lines(self._path)
                kept = [text + "\n" for text, line in whole if _step(line) <= keep_until]
                write_whole(self._path, "".join(kept))
            if keep_until is None:
                self._path.write_bytes(b"")
            # Also for reading, so that a deleted file can be written again.
            self._file = self._path.open("ab+", buffering=0)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Write a line with the numbers; images are left out."""
        if not is_main_process():
            return
        if self._file.closed:
            raise UsageError(
                f"{os.fspath(self._path)!r} is closed; continue with a new "
                f"JSONLines(..., keep_until={step - 1})."
            )
        finite = {k: _or_null(float(value)) for k, value in numbers(values).items()}
        logged = {"step": step, **finite}
        # Merged twice, so that extra comes last but replaces nothing.
        line = json.dumps(logged | self._extra | logged, allow_nan=False)
        if len(self.waiting) < _MOST_WAITING:
            self.waiting.append(line + "\n")
        elif not self._drops:
            self._drops = True
            _LOG.warning(
                "%s cannot be written, and %d lines wait for it; lines of later steps are "
                "dropped until it can be written.",
                self._path,
                _MOST_WAITING,
            )
        self._write()

    def close(self, error: BaseException | None = None) -> None:
        """Close the file."""
        if not is_main_process() or self._file.closed:
            return
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        """Write the waiting lines, and the earlier ones again if the file is gone."""
        if not self._path.exists():
            _LOG.warning(
                "%s is gone: it was deleted, renamed or unmounted during the run. It is "
                "written again.",
                self._path,
            )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.open("ab+", buffering=0)
            self._file.seek(0)
            self.waiting.insert(0, self._file.read().decode("utf-8"))
            self._file.close()
            self._file = new
        rest = "".join(self.waiting).encode("utf-8")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # No half line stays.
            raise
        self.waiting.clear()
        self._drops = False


def read_whole_lines(
    path: str | os.PathLike[str],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read each complete line, as text and as values; no lines if there is no such file.

    Lines that `JSONLines` would not write are left out: those that are not JSON objects,
    and those with integers too large for a float. The last line may be incomplete while
    the run is going on, or after it was killed.
    """
    path = Path(path)
    if not path.exists():
        return
    with open_file(path) as file:
        while data := file.readline(_LONGEST_LINE):
            if len(data) == _LONGEST_LINE:
                raise UsageError(
                    f"{os.fspath(path)!r} has a line of {_LONGEST_LINE:,} bytes or more; "
                    "it is damaged, or another file."
                )
            with contextlib.suppress(ValueError):
                text = data.decode(errors="replace").rstrip("\r\n")
                line = parse_json(text)
                if isinstance(line, dict) and all(map(_fits, line.values())):
                    yield text, line


def _fits(value: Any) -> bool:
    """False for an integer that is too large for a float."""
    return not isinstance(value, int) or abs(value) < _TOO_LARGE


def is_number(value: Any) -> bool:
    """True for JSON's null, and for a number that a float can hold."""
    return isinstance(value, int | float | None) and _fits(value)


def _step(line: Mapping[str, Any]) -> int | float:
    step = line.get("step")
    return step if isinstance(step, int) else math.inf


def or_nan(value: float | None) -> float:
    """A number of a log or a summary, in which null stands for nan and infinities."""
    return math.nan if value is None else value


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
