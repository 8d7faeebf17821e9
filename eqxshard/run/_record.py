"""The record of a run: `run.json`, what it is and how it ended, and `warnings.jsonl`.

It is written when a run starts, so that a run that is killed has one, too.
"""

import contextlib
import importlib.metadata
import json
import logging
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh

from ..trackers._files import write_whole
from ._folder import RunFolder, read_values

_LOG = logging.getLogger(__name__)

#: The packages whose versions matter most; the second line is for accelerators.
_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")


#: The most warnings that are kept, each once.
_MOST_WARNINGS = 200


class RunRecord:
    """Writes the record of a run, its warnings and its page; a context manager.

    Only the process that calls `begin` writes anything. What cannot be written is logged,
    and the run goes on.

    **Arguments:**

    - `folder`: the run's.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._facts: dict[str, Any] = {}
        self._heard = HeardWarnings()

    def __enter__(self) -> "RunRecord":
        self._heard.start()
        return self

    def warn(self, texts: Iterable[str]) -> None:
        """Print warnings on stderr, and add them to those of the run."""
        for text in texts:
            print(f"warning: {text}", file=sys.stderr)
            self._heard.add("eqxshard", text)

    def begin(self, facts: Mapping[str, Any], first: int) -> None:
        """Write the record of a run that starts, or resumes, at a step."""
        starts = read_values(self._folder.record).get("starts") if first else None
        starts = starts if isinstance(starts, list) else []
        start = {"time": _now(), "step": first}
        self._facts = {**facts, "starts": [*starts, start], "ended": None}
        self._write()
        with _not_fatal(self._folder.warnings):
            self._heard.write_to(self._folder.warnings, keep=bool(first))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._heard.stop()
        if not self._facts:
            return
        why = "" if error is None else _in_a_line(error)
        self._facts |= {"ended": {"time": _now(), "why": why}, "memory": _memory()}
        self._write()
        self._folder.write_page()

    def _write(self) -> None:
        with _not_fatal(self._folder.record):
            # Settings may be of any type.
            text = json.dumps(self._facts, indent=1, default=str) + "\n"
            write_whole(self._folder.record, text)


def describe_devices(mesh: Mesh) -> dict[str, Any]:
    """The mesh of a run, and the devices that it is made of, as values for JSON."""
    devices = list(mesh.devices.flat)
    return {
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "devices": {
            "kind": devices[0].device_kind,
            "count": mesh.size,
            "per_process": sum(
                device.process_index == devices[0].process_index for device in devices
            ),
        },
        "host": f"{platform.node()}, {platform.platform()}",
        "command": shlex.join(sys.argv),
    }


def versions() -> dict[str, str]:
    """The versions of Python, of this library, and of the packages that it is built on."""
    # Not by an import, as this module is a part of it.
    ours = {"python": platform.python_version()}
    ours |= {"eqxshard": sys.modules["eqxshard"].__version__}
    for name in (*_PACKAGES, *_PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            ours[name] = importlib.metadata.version(name)
    return ours


@contextlib.contextmanager
def _not_fatal(path: Path) -> Any:
    """Log that a file could not be written, instead of ending the run."""
    try:
        yield
    except OSError as error:
        _LOG.error("%s cannot be written: %s. Training continues.", path, error)


def _memory() -> dict[str, int] | None:
    """The most bytes that were in use on a device of this process, if devices tell."""
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in found if "peak_bytes_in_use" in each]
    if not peaks:
        return None
    limits = [each["bytes_limit"] for each in found if "bytes_limit" in each]
    return {"peak": max(peaks)} | ({"limit": min(limits)} if limits else {})


def _in_a_line(error: BaseException) -> str:
    """What ended a run, in words."""
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT, such as by Ctrl-C"
    if isinstance(error, SystemExit) and error.code == 143:
        return "SIGTERM, such as by a scheduler"
    said = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {said}"[:400] if said else name


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class HeardWarnings:
    """Listens to `logging`, from its level WARNING, and to Python's warnings.

    All are still shown where they would be. Each text is kept once.
    """

    def __init__(self):
        self._lines: dict[str, str] = {}
        self._path: Path | None = None
        self._handler = _Handler(self.add)
        self._shown: Callable[..., None] = warnings.showwarning

    def start(self) -> None:
        """Listen from now on."""
        logging.getLogger().addHandler(self._handler)
        self._shown = warnings.showwarning
        warnings.showwarning = self._show

    def stop(self) -> None:
        """Listen no more."""
        logging.getLogger().removeHandler(self._handler)
        # Unless somebody else listens by now, too, who would be cut off.
        if warnings.showwarning == self._show:
            warnings.showwarning = self._shown

    def add(self, source: str, text: str) -> None:
        """Keep a warning, if it is new."""
        if text in self._lines or len(self._lines) >= _MOST_WARNINGS:
            return
        line = {"time": _now(), "source": source, "text": text}
        self._lines[text] = json.dumps(line) + "\n"
        if self._path is not None:
            # A full disk has been logged by others, and logging it here would come back.
            with (
                contextlib.suppress(OSError),
                self._path.open("a", encoding="utf-8") as file,
            ):
                file.write(self._lines[text])

    def write_to(self, path: Path, *, keep: bool) -> None:
        """Write what was heard, and from now on each warning, to a file.

        **Arguments:**

        - `path`: the file, which need not exist; without warnings, it is not made.
        - `keep`: keep what is there from an earlier start of the run.
        """
        if not keep:
            path.unlink(missing_ok=True)
        if self._lines:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(self._lines.values()))
        self._path = path

    def _show(self, message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        self.add(category.__name__, str(message))
        self._shown(message, category, *args, **kwargs)


class _Handler(logging.Handler):
    """Passes records on; shows those that nobody else shows, as `logging` does."""

    def __init__(self, heard: Callable[[str, str], None]):
        super().__init__(logging.WARNING)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        # A malformed call must not raise into its caller; those that show it say so.
        with contextlib.suppress(Exception):
            self._heard(record.name, record.getMessage())
        # With a handler, even one that shows nothing, `logging` leaves out its last resort.
        if logging.lastResort is not None and not self._is_shown(record):
            logging.lastResort.handle(record)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False
