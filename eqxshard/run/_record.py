"""The record of a run: its facts and its end in `run.json`, and `warnings.jsonl`.

It is written when a run starts, so that a run that is killed has one, too.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from ..sharding._text import say
from ..trackers._jsonl import read_whole_lines
from ..trackers._writing import write_whole
from ._collect_warnings import collect_warnings
from ._facts import peak_memory
from ._paths import read_values
from ._run_folder import RunFolder

_LOG = logging.getLogger(__name__)

#: The facts that are recorded of each start of a run, because they may change.
_OF_EACH_START = (
    "settings",
    "versions",
    "mesh",
    "devices",
    "data",
    "parameters",
)

#: The most warnings that are kept, each once.
_MOST_WARNINGS = 200


class RunRecord:
    """Writes the record of a run, its warnings and its page; a context manager.

    It keeps each warning once: those that this library logs, from the level WARNING, and
    those of Python's `warnings`. Only the process that calls `begin` writes files. If one
    cannot be written, that is logged, and the run goes on.

    **Arguments:**

    - `folder`: the folder of the run.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._facts: dict[str, Any] = {}
        self._warnings: dict[str, str] = {}
        self._collecting = collect_warnings(self.keep_warning)
        #: Why the run ends before its last step, if no error ends it.
        self.stopped = ""

    def __enter__(self) -> "RunRecord":
        self._collecting.__enter__()
        return self

    def warn(self, texts: Iterable[str]) -> None:
        """Print warnings on stderr, and keep them with those of the run."""
        for text in texts:
            say(f"warning: {text}", sys.stderr)
            self.keep_warning("eqxshard", text)

    def keep_warning(self, source: str, text: str) -> None:
        """Keep a warning, if it is new."""
        if text in self._warnings or len(self._warnings) >= _MOST_WARNINGS:
            return
        line = json.dumps({"time": _now(), "source": source, "text": text}) + "\n"
        self._warnings[text] = line
        if self._facts:
            # An error that is logged here would come back as a warning.
            with contextlib.suppress(OSError):
                self._append(line)

    def changes(self, facts: Mapping[str, Any]) -> list[str]:
        """The differences from the start before this one, such as `seed 0 -> 1`."""
        # Imported here: only a run that resumes needs it.
        from ._changes import changes

        before = read_values(self._folder.record)
        # Without a record, everything would differ. And users may have edited it.
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            return changes(before, facts) if before else []
        return []

    def begin(self, facts: Mapping[str, Any], first: int) -> None:
        """Write the record of a run that starts or resumes.

        **Arguments:**

        - `facts`: what is known of the run, by name.
        - `first`: the number of steps taken before; 0 for a new run.
        """
        starts = read_values(self._folder.record).get("starts") if first else None
        starts = starts if isinstance(starts, list) else []
        own = {name: facts[name] for name in _OF_EACH_START if name in facts}
        start = {"time": _now(), "step": first, **own}
        self._facts = {**facts, "starts": [*starts, start], "ended": None}
        self._write()
        with self._not_fatal("warnings"):
            if not first:
                self._folder.warnings.unlink(missing_ok=True)
            kept = {line.get("text") for _, line in read_whole_lines(self._folder.warnings)}
            new = [line for text, line in self._warnings.items() if text not in kept]
            self._warnings |= {str(text): "" for text in kept}
            if new:
                self._append("".join(new))

    def __exit__(self, *failure: Any) -> None:
        self._collecting.__exit__(*failure)
        if not self._facts:
            return
        _, error, _ = failure
        why = self.stopped if error is None else _in_a_line(error)
        self._facts |= {"ended": {"time": _now(), "why": why}, "memory": peak_memory()}
        self._write()
        self._folder.write_page()

    def _write(self) -> None:
        with self._not_fatal("record"):
            # Settings may be of any type.
            text = json.dumps(self._facts, indent=1, default=str) + "\n"
            write_whole(self._folder.record, text)

    def _append(self, lines: str) -> None:
        with self._folder.warnings.open("a", encoding="utf-8") as file:
            file.write(lines)

    @contextlib.contextmanager
    def _not_fatal(self, name: str) -> Iterator[None]:
        """Log that a file could not be written, instead of ending the run."""
        try:
            yield
        except OSError as error:
            path = getattr(self._folder, name)
            _LOG.error("%s cannot be written: %s. Training continues.", path, error)


def _in_a_line(error: BaseException) -> str:
    """The reason why a run ended, in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT, such as by Ctrl-C"
    if isinstance(error, SystemExit) and error.code == 143:
        return "SIGTERM, such as by a scheduler"
    said = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {said}"[:400] if said else name


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
