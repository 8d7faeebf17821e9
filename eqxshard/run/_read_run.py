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
from ..trackers._jsonl import or_nan
from ..trackers._tracker import Metric, metrics, times
from ._folder import RunFolder, read_values


@dataclass(frozen=True)
class Report:
    """A line of the log: its numbers, of which those that were not finite are nan."""

    step: int
    values: Mapping[str, float]

    @cached_property
    def metrics(self) -> list[Metric]:
        """What describes the model."""
        return list(metrics(self.values))


@dataclass(frozen=True)
class RecordedRun:
    """What the files of a run say, each read when it is asked for; any may be missing."""

    folder: RunFolder

    @cached_property
    def record(self) -> dict[str, Any]:
        """What `run.json` has."""
        return read_values(self.folder.record)

    @cached_property
    def reports(self) -> list[Report]:
        """The numbers of each line of the log that is whole."""
        return [_report(line) for line in self.folder.history()]

    @property
    def title(self) -> str:
        """Its name, devices and mesh."""
        return self.record.get("title") or self.folder.path.name

    @property
    def step(self) -> int:
        """The last step that is logged or saved."""
        saved = CheckpointFolder(self.folder.checkpoints).known_steps()
        return max([0, *saved, *(report.step for report in self.reports[-1:])])

    @property
    def last_written(self) -> datetime:
        """When the last line was logged; without a log, when the run started."""
        files = (self.folder.metrics, self.folder.record)
        newest = next(file for file in files if file.exists())
        return datetime.fromtimestamp(newest.stat().st_mtime).astimezone()

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
            return f"At {at} on {self.last_written:%Y-%m-%d %H:%M}, and not ended since"
        why = self.record["ended"].get("why")
        return f"Stopped at {at}: {why}" if why else f"Stopped at {at}"

    @cached_property
    def evaluations(self) -> list[Report]:
        """The reports that have an evaluation."""
        return [x for x in self.reports if any(m.kind == "eval" for m in x.metrics)]

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

    @property
    def best(self) -> float | None:
        """The best value of the metric whose best checkpoint the run keeps, if it does."""
        name = str(self.record.get("best"))
        found = [each.values.get(name, math.nan) for each in self.reports]
        choose = min if self.record.get("mode") == "min" else max
        return choose(filter(math.isfinite, found), default=None)

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
    return RecordedRun(folder)


def summarize(
    run: RecordedRun, steps_per_epoch: int, examples: int, unit: str
) -> dict[str, Any]:
    """Metrics and speed of a run, for its summary.

    **Arguments:**

    - `run`: the run.
    - `steps_per_epoch`, `examples`: the number of steps and of examples in an epoch.
    - `unit`: the name of the examples, such as `images`.

    **Returns:**

    For each evaluated metric its last value, and a list of all; the seconds of an epoch,
    and the examples per second; the wall time by part, and the share of it in which
    training steps ran. What is not known is `None`.
    """
    summary: dict[str, Any] = {}
    evaluated = [metric for report in run.evaluations for metric in report.metrics]
    for kind, name, value in evaluated:
        if kind == "eval":
            known = value if math.isfinite(value) else None
            summary[f"test_{name}"] = known
            summary.setdefault(f"test_{name}_by_epoch", []).append(known)
    if run.parts:
        summary |= {"seconds": run.parts, "goodput": run.goodput}
    pace = run.step_seconds and run.step_seconds * steps_per_epoch
    speed = pace and examples / pace
    return summary | {"seconds_per_epoch": pace, f"{unit}_per_second": speed}


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


def _report(line: Mapping[str, Any]) -> Report:
    numbers = {k: v for k, v in line.items() if isinstance(v, int | float | None)}
    values = {name: float(or_nan(x)) for name, x in numbers.items() if name != "step"}
    return Report(line["step"], values)


def _median(found: Sequence[float]) -> float | None:
    """The median, without the first report, during which the step compiles."""
    return statistics.median(found[1:] or found) if found else None
