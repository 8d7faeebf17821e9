"""The record of a run: `run.json`, what it is and how it ended, and `warnings.jsonl`.

It is written when a run starts, so that a run that is killed has one, too.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jax
from jax.sharding import Mesh

from .._errors import UsageError, UsageTypeError
from ..sharding._text import say
from ..trackers._files import write_whole
from ..trackers._jsonl import read_whole_lines
from ._config import RunConfig
from ._read_run import changes
from ._run_folder import RunFolder, read_values

_LOG = logging.getLogger(__name__)
#: The loggers of all modules of this library are below it.
_OURS = logging.getLogger("eqxshard")

#: The packages whose versions matter most; the second line is for accelerators.
_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "tensorstore", "grain", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")

#: What each start of a run is recorded with, because it may differ from the others.
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

    It hears what this library logs, from the level WARNING, and what Python's `warnings`
    show, and keeps each text once. Only the process that calls `begin` writes anything.
    What cannot be written is logged, and the run goes on.

    **Arguments:**

    - `folder`: the run's.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._facts: dict[str, Any] = {}
        self._warnings: dict[str, str] = {}
        self._hearing = hearing_warnings(self.keep_warning)
        #: Why the run ends before its last step, if no error ends it.
        self.stopped = ""

    def __enter__(self) -> "RunRecord":
        self._hearing.__enter__()
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
            # Logging here that the disk is full would come back as a warning.
            with contextlib.suppress(OSError):
                self._append(line)

    def changes(self, facts: Mapping[str, Any]) -> list[str]:
        """What differs from the start before this one, such as `seed 0 -> 1`."""
        before = read_values(self._folder.record)
        # Without a record everything would; and somebody may have edited it.
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            return changes(before, facts) if before else []
        return []

    def begin(self, facts: Mapping[str, Any], first: int) -> None:
        """Write the record of a run that starts, or resumes, at a step."""
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
        self._hearing.__exit__(*failure)
        if not self._facts:
            return
        _, error, _ = failure
        why = self.stopped if error is None else _in_a_line(error)
        self._facts |= {"ended": {"time": _now(), "why": why}, "memory": _memory()}
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


class _Listener(logging.Handler):
    """Calls a function with the name of the logger and the text of each warning."""

    def __init__(self, keep: Callable[[str, str], None]):
        super().__init__(logging.WARNING)
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning, and show it if nothing else does."""
        # A malformed call must not raise into its caller; those that show it say so.
        with contextlib.suppress(Exception):
            self._keep(record.name, record.getMessage())
        # Python shows by itself what no handler takes, and this one has taken it.
        others = {*logging.root.handlers, *_OURS.handlers} - {self}
        if not others and logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextlib.contextmanager
def hearing_warnings(keep: Callable[[str, str], None]) -> Iterator[None]:
    """Call a function with the source and the text of each warning of a run.

    These are the ones that this library logs, and all that Python's `warnings` show. They
    are shown as they would be without it.
    """
    show, listener = warnings.showwarning, _Listener(keep)

    def show_and_keep(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        keep(category.__name__, str(message))
        show(message, category, *args, **kwargs)

    warnings.showwarning = show_and_keep
    _OURS.addHandler(listener)
    try:
        yield
    finally:
        _OURS.removeHandler(listener)
        # Unless somebody else listens by now, too, who would be cut off.
        if warnings.showwarning is show_and_keep:
            warnings.showwarning = show


def describe_devices(mesh: Mesh) -> dict[str, Any]:
    """The mesh of a run, and the devices that it is made of, as values for JSON."""
    first, *others = mesh.devices.flat
    beside = [each for each in others if each.process_index == first.process_index]
    return {
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "devices": {
            "kind": first.device_kind,
            "count": mesh.size,
            "per_process": 1 + len(beside),
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


def name_settings(settings: Any, config: RunConfig) -> dict[str, Any]:
    """The settings of a script by path, such as `encoder.width`, and the options of a run.

    A setting that has the name of an option is called `settings.seed`, say. Values are as
    JSON has them; what it has no kind for, such as a path, is text.

    **Arguments:**

    - `settings`: a dataclass or a dict, or `None`. A `RunConfig` in it is left out.
    - `config`: the options.

    **Raises:**

    `TypeError` if `settings` is something else; `ValueError` if two of them have one name.
    """
    options = dict(_entries(config))
    named: dict[str, Any] = {}
    if settings is not None and not _is_group(settings):
        raise UsageTypeError(
            f"settings= is a {type(settings).__name__}; give a dataclass or a dict, such "
            "as vars(it)."
        )
    for path, value in _flatten(settings or {}):
        name = f"settings.{path}" if path in options else path
        if name in named:
            raise UsageError(f"two settings are called {name!r}; rename one of them.")
        named[name] = value
    return {name: _as_json(value) for name, value in {**named, **options}.items()}


def _is_group(value: Any) -> bool:
    is_class = isinstance(value, type)
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not is_class)


def _entries(group: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(group, Mapping):
        yield from ((str(name), value) for name, value in group.items())
    else:
        names = (field.name for field in dataclasses.fields(group))
        yield from ((name, getattr(group, name)) for name in names)


def _flatten(group: Any) -> Iterator[tuple[str, Any]]:
    """The settings in a group, and in the groups in it, by path."""
    for name, value in _entries(group):
        if isinstance(value, RunConfig):
            continue
        if _is_group(value):
            yield from ((f"{name}.{path}", inner) for path, inner in _flatten(value))
        else:
            yield name, value


def _as_json(value: Any) -> Any:
    text = json.dumps(value, default=str)
    return json.loads(text, parse_constant=str)  # Such as NaN.


def _memory() -> dict[str, int] | None:
    """The most bytes that were in use on a device of this process, if devices tell."""
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in found if "peak_bytes_in_use" in each]
    limits = [each["bytes_limit"] for each in found if "bytes_limit" in each]
    if not peaks:
        return None
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
