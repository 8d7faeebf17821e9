"""One page of several runs: their curves over each other, their results, what differs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..pages import _kit as kit
from ..pages._format import format_seconds
from ..pages._kit import Markup, tag
from ..sharding._text import format_mesh
from ..trackers._files import write_whole
from ._curves import draw_curves
from ._folder import RunFolder
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
    paths = [Path(folder).resolve() for folder in folders]
    if len({*paths}) < len(paths):
        raise ValueError("two of the folders are the same; give each run once.")
    common = os.path.commonpath(paths)
    runs = {str(path.relative_to(common)): read_run(RunFolder(path)) for path in paths}
    with showing(*paths):
        text = render_runs(runs)
    write_whole(Path(output), text)


def render_runs(runs: Mapping[str, RecordedRun]) -> str:
    """The page, as text; the runs by name."""
    cards = (
        kit.card("runs", "Runs", _results(runs)),
        kit.card("curves", "Curves", draw_curves(runs)),
        kit.card("settings", "What differs", *_differences(runs)),
    )
    return kit.fill_page(
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
    best = {run.record["best"] for run in runs.values() if run.record.get("best")}
    rows: list[list[kit.Entry]] = [
        [
            _label(position, name),
            run.state,
            run.step,
            *map(run.last, evaluated),
            *([run.best] if best else []),
            kit.number(run.step_seconds, format_seconds),
            run.examples_per_second,
            kit.number(run.goodput, "{:.0%}".format),
        ]
        for position, (name, run) in enumerate(runs.items())
    ]
    columns = ("Run", "State", "Step", *evaluated)
    columns += (f"Best {', '.join(sorted(best))}",) if best else ()
    columns += ("Time of a step", "Examples per second", "Goodput")
    return kit.sortable_table("runs", columns, rows)


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
    table = kit.plain_table("What differs between the runs", ("", *runs), rows)
    return [kit.scroller("what differs between the runs", table)]


def _facts(run: RecordedRun) -> dict[str, str]:
    """The settings of a run and what else it may differ in, as text."""
    record = run.record
    facts = dict(record.get("settings") or {})
    # Options have such names, too, and may not say what they came to.
    facts |= {name: record.get(name) for name in ("data", "parameters")}
    if devices := record.get("devices"):
        facts["mesh"] = format_mesh(record.get("mesh") or {})
        facts["devices"] = f"{devices['count']} x {devices['kind']}"
        facts["devices of a process"] = devices["per_process"]
    for package, version in (record.get("versions") or {}).items():
        facts[f"version of {package}"] = version
    own = ("output", "resume")  # Of every run.
    return {k: str(v) for k, v in facts.items() if v is not None and k not in own}
