"""`RunResult`: the state and the numbers at the end of a run; and `summary.json`."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pages._format import format_number, format_value
from ..sharding._text import comma_list
from ..trackers._jsonl import is_number, or_nan
from ._paths import RunPaths, read_values

if TYPE_CHECKING:
    from ._recorded_run import RecordedRun

#: The kinds of metrics of an evaluation, and the prefixes of their names in a summary.
_EVALUATED = {"eval": "test_", "ema": "ema_"}
#: The suffix of the list that has the values of a metric in all evaluations.
_ALL = "_by_evaluation"
#: The names in a summary whose values are numbers, or null.
_NUMBERS = rf"^(test|ema)_(?!.*{_ALL}$)|_per_epoch$|_per_second$"


@dataclass(frozen=True)
class RunResult:
    """The result of [`eqxshard.train`][]. `str` is one line of it, to end a script with.

    - `state`: the [`eqxshard.TrainState`][] at the end; of several models, a dict of them.
    - `metrics`: the values of the last evaluation, by metric; those of averaged weights as
        `ema/loss`.
    - `speed`: time per epoch and throughput: `14.7 s/epoch | 4,072 images/s`. They are
        medians of the reports after the first, which includes compilation; a run with one
        report has only that.
    - `title`: the name, devices and mesh of the run: `LeNet on 2 x cpu (data=2)`.
    - `folder`: the folder of the run's files.
    - `summary`: the contents of `summary.json`.
    """

    # A notebook shows the repr, which leaves out `state` and `summary`: they are long.
    state: Any = field(repr=False)
    metrics: dict[str, float]
    speed: str
    title: str
    folder: Path
    summary: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        parts = [self.speed, self.title]
        if best := self.summary.get("best"):
            name = str(best["metric"]).removeprefix("eval/")
            said = f"best {name} {format_value(best['value'])} at step {best['step']:,}"
            parts.insert(0, said)
        if self.metrics:
            values = (f"{name} {format_value(x)}" for name, x in self.metrics.items())
            step = self.summary.get("evaluated_at")
            at = "" if step is None else f" at step {step:,}"
            parts.insert(0, f"evaluated{at}: {comma_list(values)}")
        return " | ".join(parts)


def make_result(
    state: Any, folder: Path, summary: dict[str, Any], title: str, unit: str
) -> RunResult:
    """The result of a run.

    **Arguments:**

    - `state`, `folder`, `summary`: as in `RunResult`.
    - `title`: the title, if the summary has none.
    - `unit`: the word for examples, such as `images`.
    """
    pace = or_nan(summary.get("seconds_per_epoch"))
    speed = or_nan(summary.get(f"{unit}_per_second"))
    return RunResult(
        state=state,
        metrics=dict(_metrics(summary)),
        speed=f"{format_number(pace)} s/epoch | {format_number(speed)} {unit}/s",
        title=summary.get("title", title),
        folder=folder,
        summary=summary,
    )


def _metrics(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The last value of each metric in a summary."""
    for name, value in summary.items():
        kind, _, metric = name.partition("_")
        if kind in ("test", "ema") and not name.endswith(_ALL):
            yield metric if kind == "test" else f"ema/{metric}", or_nan(value)


def summarize(run: "RecordedRun", steps_per_epoch: int | None, unit: str) -> dict[str, Any]:
    """Metrics and speed of a run, for its summary.

    **Arguments:**

    - `run`: the run.
    - `steps_per_epoch`: the number of steps in an epoch, if there are epochs.
    - `unit`: the word for examples, such as `images`.

    **Returns:**

    For each evaluated metric, its last value, as `test_loss`, or `ema_loss` for averaged
    weights, and the list of its values; the step of the last evaluation; the best value of
    the metric by which the best checkpoint is kept. For the last start: the seconds of an
    epoch and the examples per second; the wall time by part, and the share of it in which
    training steps ran. Values that are not known are `None`, or left out.
    """
    summary: dict[str, Any] = {}
    for report in run.evaluations:
        summary["evaluated_at"] = report.step
        for kind, name, value in report.metrics:
            if kind in _EVALUATED:
                known = value if math.isfinite(value) else None
                summary[f"{_EVALUATED[kind]}{name}"] = known
                summary.setdefault(f"{_EVALUATED[kind]}{name}{_ALL}", []).append(known)
    if run.best is not None:
        value, step = run.best
        summary["best"] = {"metric": run.record["best"], "value": value, "step": step}
    start = run.last_start
    if start.parts:
        summary |= {"seconds": start.parts, "goodput": start.goodput}
    pace = start.step_seconds and steps_per_epoch and start.step_seconds * steps_per_epoch
    speed = start.examples_per_second
    return summary | {"seconds_per_epoch": pace, f"{unit}_per_second": speed}


def read_summary(paths: RunPaths) -> dict[str, Any]:
    """The contents of `summary.json`; empty if there is none, or it is damaged."""
    found = read_values(paths.summary)
    read = (x for name, x in found.items() if re.search(_NUMBERS, name))
    return found if all(map(is_number, read)) else {}
