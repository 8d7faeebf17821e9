import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from ._files import writing


class JSONLines:
    """Writes each report as one line of JSON, readable while the run goes on.

    A line is `{"step": 50, "epoch": 0.21, "train/loss": 0.83, ...}`. It is in the file
    when `log` returns, so that the file of a killed run is whole. Values that are not
    finite are `null`: JSON has no others.

    **Arguments:**

    - `path`: the file to write. Its folder is made where it is missing.
    - `append`: go on at the end of the file, as a resumed run does, instead of emptying
        it first.
    - `extra`: what to add to every line, such as `{"data": "synthetic"}`, except where
        a value of that name is logged.

    **Raises:**

    `ValueError` if the file cannot be written, or `extra` is not JSON or names `step` or
    `epoch`; from `log`, if it is closed.

    !!! Example

        ```python
        tracker = eqxshard.trackers.JSONLines("runs/metrics.jsonl", extra={"seed": 0})
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        append: bool = False,
        extra: Mapping[str, object] = {},
    ):
        for name in ("step", "epoch"):
            if name in extra:
                raise ValueError(
                    f"extra names {name!r}, which every line has already; use another name."
                )
        try:
            json.dumps(dict(extra), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra is not JSON: {error}; use text, finite numbers, lists and dicts."
            ) from error
        self._path = Path(path)
        self._extra = dict(extra)
        with writing(self._path):
            self._file = self._path.open("a" if append else "w", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line."""
        if self._file.closed:
            raise ValueError(
                f"{os.fspath(self._path)!r} is closed; go on with a new "
                "JSONLines(..., append=True)."
            )
        finite = {name: _or_null(float(value)) for name, value in values.items()}
        logged = {"step": step, **finite}
        # Twice: extra comes last, and replaces nothing.
        line = json.dumps(logged | self._extra | logged, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
