"""A run as its folder tells it, whether it is finished, stopped, killed or running."""

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checkpoint._folder import CheckpointFolder
from ..loop._clock import goodput
from ..trackers._jsonl import or_nan, read_whole_lines
from ..trackers._values import Metric, metrics, times
from ._folder import RunFolder, read_values


@dataclass(frozen=True)
class Reported:
    """A line of the log: its numbers, of which those that were not finite are nan."""

    step: int
    values: Mapping[str, float]

    @property
    def epoch(self) -> float | None:
        """How far the run was."""
        return self.values.get("epoch")

    @cached_property
    def metrics(self) -> list[Metric]:
        """What describes the model."""
        return list(metrics(self.values))

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the run, since the last report."""
        return times(self.values)


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint: its size on disk, when it was complete, and its metrics."""

    step: int
    nbytes: int
    time: datetime
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class RecordedRun:
    """What the files of a run say; all but the log may be missing.

    - `path`: its folder.
    - `record`: of `run.json`.
    - `lines`: of `metrics.jsonl`, those that are whole.
    - `written`: when the last of them was written.
    - `warnings`: of `warnings.jsonl`.
    - `checkpoints`: in order.
    - `plan`: of `plan.json`, as [`eqxshard.Plan.to_json`][] makes it.
    - `crash_dump`: the folder of a crash dump.
    """

    path: Path
    record: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    written: datetime
    warnings: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[SavedStep]
    plan: Mapping[str, Any] | None
    crash_dump: Path | None

    @property
    def title(self) -> str:
        """Its name, devices and mesh."""
        return self.record.get("title") or self.path.name

    @property
    def step(self) -> int:
        """The last step that is logged or saved."""
        logged = [line["step"] for line in self.lines[-1:]]
        return max([0, *logged, *(each.step for each in self.checkpoints)])

    @property
    def state(self) -> str:
        """`finished`, `stopped` or `not ended`."""
        steps, ended = self.record.get("steps"), self.record.get("ended")
        if steps is not None and self.step >= steps and not (ended or {}).get("why"):
            return "finished"
        return "stopped" if ended else "not ended"

    @property
    def headline(self) -> str:
        """A sentence on how far it is."""
        if self.state == "finished":
            return f"Finished after {self.step:,} steps"
        steps = self.record.get("steps")
        at = f"step {self.step:,}" + ("" if steps is None else f" of {steps:,}")
        if self.state == "not ended":
            return f"At {at} on {self.written:%Y-%m-%d %H:%M}, and not ended since"
        why = self.record["ended"].get("why")
        return f"Stopped at {at}: {why}" if why else f"Stopped at {at}"

    @cached_property
    def reports(self) -> list[Reported]:
        """The numbers of each line."""
        return [_report(line) for line in self.lines]

    @cached_property
    def evaluations(self) -> list[Reported]:
        """The reports that have an evaluation."""
        return [x for x in self.reports if any(m.kind == "eval" for m in x.metrics)]

    @cached_property
    def parts(self) -> dict[str, float]:
        """The seconds of each part of the wall time."""
        total: dict[str, float] = {}
        for report in self.reports:
            for part, seconds in report.parts.items():
                total[part] = total.get(part, 0.0) + seconds
        return total

    @property
    def goodput(self) -> float | None:
        """The share of the wall time in which steps ran, if it is known."""
        known = {"dispatch", "device"} <= self.parts.keys() and sum(self.parts.values())
        return goodput(self.parts) if known else None

    @cached_property
    def step_seconds(self) -> float | None:
        """The median time of a step."""
        found, last = list[float](), 0
        for report in self.reports:
            seconds = report.values.get("train/seconds")
            if seconds and report.step > last:
                found.append(seconds / (report.step - last))
            last = report.step
        return _median(found)

    @cached_property
    def examples_per_second(self) -> float | None:
        """The median of the reports."""
        speeds = (each.values.get("train/examples_per_second") for each in self.reports)
        return _median([speed for speed in speeds if speed])

    def last(self, key: str) -> float | None:
        """The last value of this name that is finite."""
        found = (each.values.get(key, math.nan) for each in reversed(self.reports))
        return next(filter(math.isfinite, found), None)


def read_run(folder: RunFolder) -> RecordedRun:
    """Read the folder of a run.

    **Raises:**

    `ValueError` if it is not one.
    """
    if not folder.path.is_dir():
        raise ValueError(f"there is no folder {folder.path}; give the folder of a run.")
    if not (folder.metrics.exists() or folder.record.exists()):
        raise ValueError(
            f"{folder.path} is not the folder of a run: it has no {folder.metrics.name}; "
            "give one such as runs/NAME."
        )
    newest = folder.metrics if folder.metrics.exists() else folder.record
    lines = [line for _, line in read_whole_lines(folder.metrics)]
    crash = folder.checkpoints / "crash_dump"
    return RecordedRun(
        path=folder.path,
        record=read_values(folder.record),
        lines=[line for line in lines if isinstance(line.get("step"), int)],
        written=datetime.fromtimestamp(newest.stat().st_mtime).astimezone(),
        warnings=[line for _, line in read_whole_lines(folder.warnings)],
        checkpoints=_checkpoints(folder.checkpoints),
        plan=read_values(folder.path / "plan.json") or None,
        crash_dump=crash if crash.is_dir() else None,
    )


@contextlib.contextmanager
def showing(*folders: Path) -> Iterator[None]:
    """Say in a sentence that the files of runs, whoever wrote them, make no sense."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"what the files of {', '.join(map(str, folders))} say cannot be shown "
            f"({type(error).__name__}: {error}); they are damaged, or of another version."
        ) from error


def _median(found: Sequence[float]) -> float | None:
    """The median, without the first report, during which the step compiles."""
    return statistics.median(found[1:] or found) if found else None


def _report(line: Mapping[str, Any]) -> Reported:
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float | None)}
    values = {k: float(or_nan(v)) for k, v in numbers.items() if k != "step"}
    return Reported(line["step"], values)


def _checkpoints(path: Path) -> list[SavedStep]:
    folder, found = CheckpointFolder(path), list[SavedStep]()
    for step in folder.known_steps():
        # Another process may remove it meanwhile, and it may be damaged.
        with contextlib.suppress(OSError):
            files = [file for file in Path(folder.at(step)).rglob("*") if file.is_file()]
            if not files:
                continue
            time = datetime.fromtimestamp(max(file.stat().st_mtime for file in files))
            saved: Mapping[str, float] = {}
            with contextlib.suppress(ValueError, TypeError):
                saved = folder.description(step)["metrics"]
            size = sum(file.stat().st_size for file in files)
            found.append(SavedStep(step, size, time.astimezone(), saved))
    return found
