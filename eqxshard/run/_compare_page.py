"""One page of several runs: their curves over each other, their results, what differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..pages._format import format_seconds
from ..pages._html import Markup, join, tag
from ..pages._parts import card, number_cell, scroller, sortable_table
from ..sharding._text import format_mesh
from ..trackers._files import write_whole
from ._folder import RunFolder
from ._page import fill_run_page, names_of
from ._read_run import RecordedRun, read_run, showing
from ._run_curves import draw_curves, format_value


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
    return fill_run_page(
        title=f"{len(runs)} runs: {', '.join(runs)}",
        about=", ".join(runs),
        headline=f"{len(runs)} runs compared",
        tiles=Markup(""),
        cards=join(*cards),
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
        values = [run.last(key) for key in evaluated]
        pace, speed, goodput = run.step_seconds, run.examples_per_second, run.goodput
        rows.append(
            tag(
                "tr",
                tag("th", _label(number, name), scope="row"),
                tag("td", run.short_state),
                number_cell(f"{run.step:,}", run.step),
                *[number_cell("" if v is None else format_value(v), v) for v in values],
                number_cell("" if pace is None else format_seconds(pace), pace),
                number_cell("" if speed is None else format_value(speed), speed),
                number_cell("" if goodput is None else f"{goodput:.0%}", goodput),
            )
        )
    columns = {"Run": False, "State": False, "Step": True} | dict.fromkeys(evaluated, True)
    columns |= {"Time of a step": True, "Examples per second": True, "Goodput": True}
    return sortable_table("runs", "Runs", columns, rows, "runs", ordered=None)


def _label(number: int, name: str) -> Markup:
    """A run's colour and name, and a box that hides its curves, for which a script is."""
    box = tag("input", type="checkbox", checked=True, hidden=True, data_run=number)
    return tag("label", box, tag("span", class_=f"stroke c{number % 8}"), name)


def _differences(runs: Mapping[str, RecordedRun]) -> list[Markup]:
    found = {name: _facts(run) for name, run in runs.items()}
    keys = dict.fromkeys(key for facts in found.values() for key in facts)
    rows = []
    for key in keys:
        values = [facts.get(key, "") for facts in found.values()]
        if len(set(values)) > 1:
            cells = [tag("td", value) for value in values]
            rows.append(tag("tr", tag("th", key, scope="row"), *cells))
    if not rows:
        return [tag("p", "Their settings, devices and versions are the same.")]
    head = [tag("th", name, scope="col") for name in ("", *runs)]
    table = tag(
        "table",
        tag("caption", "What differs between the runs", class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *rows),
        class_="differs",
    )
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
