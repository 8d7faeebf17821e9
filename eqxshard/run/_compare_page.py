"""One page of several runs: their curves over each other, their results, what differs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..pages._format import format_seconds, format_value
from ..pages._html import Markup, tag
from ..pages._kit import (
    Number,
    card,
    fill_page,
    plain_table,
    scroller,
    sortable_table,
)
from ..sharding._text import format_mesh
from ..trackers._files import write_whole
from ._folder import RunFolder
from ._read_run import RecordedRun, read_run, showing
from ._run_curves import draw_curves


def compare_runs(folders: Sequence[str], output: str) -> None:
    """Write a page of several runs.

    **Arguments:**

    - `folders`: of the runs.
    - `output`: the file to write.

    **Raises:**

    `ValueError` if they are fewer than two, or one is not the folder of a run.
    """
    if len(folders) < 2:
        raise ValueError("there is only one run to compare; give two or more folders.")
    runs = [read_run(RunFolder(folder)) for folder in folders]
    with showing(*(run.path for run in runs)):
        text = render_runs(dict(zip(names_of(runs), runs, strict=True)))
    write_whole(Path(output), text)


def render_runs(runs: Mapping[str, RecordedRun]) -> str:
    """The page, as text; the runs by name."""
    cards = (
        card("runs", "Runs", _results(runs)),
        card("curves", "Curves", draw_curves(runs) or tag("p", "Nothing is logged yet.")),
        card("settings", "What differs", *_differences(runs)),
    )
    return fill_page(
        title=f"{len(runs)} runs: {', '.join(runs)}",
        about=", ".join(runs),
        headline=f"{len(runs)} runs compared",
        tiles=Markup(""),
        cards=cards,
    )


def _results(runs: Mapping[str, RecordedRun]) -> Markup:
    names = dict.fromkeys(
        f"{metric.kind}/{metric.name}"
        for run in runs.values()
        for report in run.evaluations[-1:] or run.reports[-1:]
        for metric in report.metrics
        if metric.kind
    )
    evaluated = [name for name in names if name.startswith("eval/")] or [*names]
    rows = []
    for number, (name, run) in enumerate(runs.items()):
        rows.append(
            [
                _label(number, name),
                run.short_state,
                Number(f"{run.step:,}", run.step),
                *[_number(run.last(key), format_value) for key in evaluated],
                _number(run.step_seconds, format_seconds),
                _number(run.examples_per_second, format_value),
                _number(run.goodput, "{:.0%}".format),
            ]
        )
    columns = ("Run", "State", "Step", *evaluated)
    columns += ("Time of a step", "Examples per second", "Goodput")
    return sortable_table("runs", columns, rows)


def _number(value: float | None, text: Callable[[float], str]) -> Number:
    return Number("" if value is None else text(value), value)


def _label(number: int, name: str) -> Markup:
    """A run's colour and name, and a box that hides its curves, for which a script is."""
    box = tag("input", type="checkbox", checked=True, hidden=True, data_run=number)
    return tag("label", box, tag("span", class_=f"stroke c{number % 8}"), name)


def _differences(runs: Mapping[str, RecordedRun]) -> list[Markup]:
    found = {name: _facts(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for facts in found.values() for key in facts)
    values = {key: [facts.get(key, "") for facts in found.values()] for key in keys}
    rows = [(key, *each) for key, each in values.items() if len(set(each)) > 1]
    if not rows:
        return [tag("p", "Their settings, devices and versions are the same.")]
    table = plain_table("What differs between the runs", ("", *runs), rows)
    return [scroller("what differs between the runs", table)]


def _facts(run: RecordedRun) -> dict[str, str]:
    """The settings of a run and what else it may differ in, as text."""
    record = run.record
    ran = {"data": record.get("data")}
    if isinstance(devices := record.get("devices"), Mapping):
        ran |= {"mesh": format_mesh(record.get("mesh") or {})}
        ran |= {"devices": f"{devices['count']} x {devices['kind']}"}
        ran |= {"devices of a process": devices.get("per_process")}
    ran |= {"parameters": record.get("parameters")}
    # Options have such names, too, and may not say what they came to.
    facts = ran | dict(record.get("settings") or {}) | ran
    # Of every run its own.
    facts = {k: v for k, v in facts.items() if k not in ("output", "resume")}
    facts |= {f"version of {k}": v for k, v in (record.get("versions") or {}).items()}
    return {name: str(value) for name, value in facts.items() if value is not None}


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A short name for each run, unlike those of the others."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError("two of the folders are the same; give each run once.")
