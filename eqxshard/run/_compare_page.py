"""One page of several runs: their curves over each other, their results, what differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..pages._format import format_seconds
from ..pages._html import Markup, tag
from ..pages._kit import Cell, card, fill_page, plain_table, scroller, sortable_table
from ..sharding._text import format_mesh
from ..trackers._files import write_whole
from ._curves import draw_curves
from ._folder import RunFolder
from ._page import names_of, number
from ._read_run import RecordedRun, read_run, showing


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
        card("curves", "Curves", draw_curves(runs)),
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
    rows: list[list[Cell]] = [
        [
            _label(position, name),
            run.state,
            number(run.step),
            *[number(run.last(key)) for key in evaluated],
            number(run.step_seconds, format_seconds),
            number(run.examples_per_second),
            number(run.goodput, "{:.0%}".format),
        ]
        for position, (name, run) in enumerate(runs.items())
    ]
    columns = ("Run", "State", "Step", *evaluated)
    columns += ("Time of a step", "Examples per second", "Goodput")
    return sortable_table("runs", columns, rows)


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
    facts = dict(record.get("settings") or {})
    # Options have such names, too, and may not say what they came to.
    facts["data"] = record.get("data")
    if devices := record.get("devices"):
        facts["mesh"] = format_mesh(record.get("mesh") or {})
        facts["devices"] = f"{devices['count']} x {devices['kind']}"
        facts["devices of a process"] = devices["per_process"]
    facts["parameters"] = record.get("parameters")
    versions = record.get("versions") or {}
    facts |= {f"version of {name}": version for name, version in versions.items()}
    for own in ("output", "resume"):  # Of every run.
        facts.pop(own, None)
    return {name: str(value) for name, value in facts.items() if value is not None}
