"""A run read from its folder, be it finished, stopped, killed or still running."""

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import UsageError
from ..checkpoint._folder import CheckpointFolder, best_of
from ..loop._clock import goodput
from ..trackers._jsonl import or_nan
from ..trackers._metrics import Metric, metrics, times
from ._log import read_log
from ._paths import RunPaths, read_values

#: The name of the speed among the metrics.
SPEED = "examples per second"


class Point(NamedTuple):
    """A value that was logged at a step; nan if it was not finite."""

    step: int
    value: float


@dataclass(frozen=True)
class Report:
    """A line of the log. Numbers that were not finite are nan."""

    step: int
    values: Mapping[str, float]

    @cached_property
    def metrics(self) -> list[Metric]:
        """The values that describe the model, such as its loss; no speeds and times."""
        return list(metrics(self.values))


def _is_start(value: Any) -> bool:
    """True for an entry of the starts in `run.json`."""
    return isinstance(value, dict) and isinstance(value.get("step"), int)


@dataclass(frozen=True)
class RecordedStart:
    """A start of a run, and its reports up to the step where a later start began.

    - `step`: the step that it started from.
    - `facts`: what `run.json` says of it: `settings`, `versions`, `mesh`, `devices`.
    - `reports`: the lines that it logged.
    """

    step: int
    facts: Mapping[str, Any]
    reports: Sequence[Report]

    @property
    def time(self) -> datetime | None:
        """The time of the start, with its time zone; `None` if it is not known."""
        return _time(self.facts)

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the wall time."""
        total: dict[str, float] = {}
        for report in self.reports:
            for part, seconds in times(report.values).items():
                total[part] = total.get(part, 0.0) + seconds
        return total

    @property
    def goodput(self) -> float | None:
        """The share of the wall time in which steps ran, if it is known."""
        known = {"dispatch", "device"} <= self.parts.keys() and sum(self.parts.values())
        return goodput(self.parts) if known else None

    @cached_property
    def step_seconds(self) -> float | None:
        """The median seconds of a step; `None` without reports."""
        found, last = list[float](), self.step
        for report in self.reports:
            seconds = report.values.get("train/seconds")
            if seconds and report.step > last:
                found.append(seconds / (report.step - last))
                last = report.step
        return _median(found)

    @cached_property
    def examples_per_second(self) -> float | None:
        """The median speed of the reports; `None` without any."""
        speeds = (each.values.get("train/examples_per_second") for each in self.reports)
        return _median([speed for speed in speeds if speed])


@dataclass(frozen=True)
class RecordedRun:
    """The contents of the files of a run, each read when it is needed; any may be missing.

    - `folder`: the paths of the files.
    - `waiting`: lines of the log that wait for room on a full disk.
    """

    folder: RunPaths
    waiting: Sequence[str] = ()

    @cached_property
    def record(self) -> dict[str, Any]:
        """The contents of `run.json`."""
        return read_values(self.folder.record)

    @cached_property
    def reports(self) -> list[Report]:
        """The lines of the log, without a last one that is incomplete."""
        return [_report(line) for line in read_log(self.folder, self.waiting)]

    @cached_property
    def starts(self) -> list[RecordedStart]:
        """The starts of the run, of which all but the first resumed it."""
        said = self.record.get("starts")
        # Users may have edited the file, which must not end a run.
        known = [x for x in said if _is_start(x)] if isinstance(said, list) else []
        records = [{**self.record, **each} for each in known or [{"step": 0}]]
        steps = [each["step"] for each in records]
        # Drop reports that a later start repeats.
        ends = [min(steps[n + 1 :], default=math.inf) for n in range(len(steps))]
        return [
            RecordedStart(first, facts, [x for x in self.reports if first < x.step <= end])
            for first, end, facts in zip(steps, ends, records)
        ]

    @property
    def last_start(self) -> RecordedStart:
        """The last start that has reports, or else the last one: for speed and times."""
        reported = (each for each in reversed(self.starts) if each.reports)
        return next(reported, self.starts[-1])

    @property
    def title(self) -> str:
        """The name, devices and mesh of the run."""
        return self.record.get("title") or self.folder.path.name

    @property
    def step(self) -> int:
        """The last step that is logged or saved."""
        saved = CheckpointFolder(self.folder.checkpoints).known_steps()
        return max([0, *saved, *(report.step for report in self.reports[-1:])])

    @cached_property
    def zone(self) -> tzinfo | None:
        """The time zone of all times on the page: that of the first start.

        If that is not known, it is the zone of this process.
        """
        first = self.starts[0].time
        return (datetime.now().astimezone() if first is None else first).tzinfo

    @property
    def last_written(self) -> datetime:
        """The time of the last write to the log, or to `run.json` if there is no log."""
        files = (self.folder.metrics, self.folder.record)
        newest = next(file for file in files if file.exists())
        return datetime.fromtimestamp(newest.stat().st_mtime, self.zone)

    @property
    def ended(self) -> datetime | None:
        """The time at which the last start ended; `None` if it has not, or was killed."""
        return _time(self.record.get("ended") or {})

    @property
    def state(self) -> str:
        """`finished`, `stopped` or `not ended`."""
        steps, ended = self.record.get("steps"), self.record.get("ended")
        if steps is not None and self.step >= steps and not (ended or {}).get("why"):
            return "finished"
        return "stopped" if ended else "not ended"

    @property
    def headline(self) -> str:
        """A sentence that says how far the run is."""
        if self.state == "finished":
            return f"Finished after {self.step:,} steps"
        steps = self.record.get("steps")
        at = f"step {self.step:,}" + ("" if steps is None else f" of {steps:,}")
        if self.state == "not ended":
            written = format_time(self.last_written, self.zone)
            return f"At {at} on {written} {self.zone}, and not ended since"
        why = self.record["ended"].get("why")
        return f"Stopped at {at}: {why}" if why else f"Stopped at {at}"

    @cached_property
    def evaluations(self) -> list[Report]:
        """The reports that have an evaluation."""
        return [x for x in self.reports if any(m.kind == "eval" for m in x.metrics)]

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value of the metric that the run keeps the best checkpoint by.

        **Returns:**

        The value and its step, among the steps that have a checkpoint, if any has a value.
        `None` if there is no such metric, or it has no value.
        """
        name = str(self.record.get("best"))
        found = {each.step: each.values.get(name, math.nan) for each in self.reports}
        known = {step: value for step, value in found.items() if math.isfinite(value)}
        saved = CheckpointFolder(self.folder.checkpoints).known_steps()
        kept = {step: known[step] for step in saved if step in known}
        step = best_of(kept or known, "min" if self.record.get("mode") == "min" else "max")
        return None if step is None else (known[step], step)

    @cached_property
    def series(self) -> dict[tuple[str, str], list[Point]]:
        """The values of each metric and kind, such as `("loss", "train")`."""
        found = dict[tuple[str, str], list[Point]]()
        for report in self.reports:
            named = {(each.name, each.kind): each.value for each in report.metrics}
            if "train/examples_per_second" in report.values:
                named[SPEED, "train"] = report.values["train/examples_per_second"]
            for key, value in named.items():
                found.setdefault(key, []).append(Point(report.step, value))
        return found

    def last(self, key: str) -> float | None:
        """The last value of this name that is finite."""
        found = (each.values.get(key, math.nan) for each in reversed(self.reports))
        return next(filter(math.isfinite, found), None)


def read_run(folder: RunPaths, waiting: Sequence[str] = ()) -> RecordedRun:
    """Read the folder of a run.

    **Raises:**

    `ValueError` if it is not one.
    """
    if not folder.path.is_dir():
        what = f"{folder.path} is a file" if folder.path.exists() else ""
        what = what or f"there is no folder {folder.path}"
        raise UsageError(f"{what}; give the folder of a run.")
    if not (folder.metrics.exists() or folder.record.exists()):
        raise UsageError(
            f"{folder.path} is not the folder of a run: it has no {folder.metrics.name}; "
            "give one such as runs/NAME."
        )
    return RecordedRun(folder, waiting)


@contextlib.contextmanager
def showing(folder: Path) -> Iterator[None]:
    """Turn an error while a run is shown into one sentence about its files."""
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"the files of {folder} cannot be shown "
            f"({type(error).__name__}: {error}); correct or remove the one that is damaged "
            "or of another version: run.json, metrics.jsonl or plan.json."
        ) from error


def format_time(time: datetime, zone: tzinfo | None) -> str:
    """A time in a zone, to the minute: `2026-03-01 10:06`."""
    return f"{time.astimezone(zone):%Y-%m-%d %H:%M}"


def _time(entry: Mapping[str, Any]) -> datetime | None:
    """The time of an entry of `run.json`, in the zone that it is written in."""
    if not entry.get("time"):
        return None
    time = datetime.fromisoformat(entry["time"])
    return time if time.tzinfo else time.astimezone()


def _report(line: Mapping[str, Any]) -> Report:
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float | None)}
    values = {name: float(or_nan(x)) for name, x in numbers.items() if name != "step"}
    return Report(line["step"], values)


def _median(found: Sequence[float]) -> float | None:
    """The median, without the first report, during which the step compiles."""
    return statistics.median(found[1:] or found) if found else None
