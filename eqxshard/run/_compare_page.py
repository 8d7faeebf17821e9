"""One page of several runs: their curves over each other, their results, what differs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .._errors import UsageError
from ..inspect._tables import render
from ..pages import _kit as kit
from ..pages._format import format_number, format_seconds
from ..pages._kit import Markup, tag
from ..sharding._text import comma_list
from ..trackers._files import write_whole
from ._curves import draw_curves
from ._folder import RunFolder
from ._read_run import RecordedRun, comparable, read_run, showing


def compare_runs(folders: Sequence[str], output: str) -> str:
    """Write a page of several runs.

    **Arguments:**

    - `folders`: of the runs.
    - `output`: the file to write.

    **Returns:**

    Their last and best values as a table, to print.

    **Raises:**

    `ValueError` if they are fewer than two, or one is not the folder of a run.
    """
    if len(folders) < 2:
        raise UsageError("there is only one run to compare; give two or more folders.")
    paths = [Path(folder).resolve() for folder in folders]
    if len({*paths}) < len(paths):
        raise UsageError("two of the folders are the same; give each run once.")
    common = os.path.commonpath(paths)
    runs = {str(path.relative_to(common)): read_run(RunFolder(path)) for path in paths}
    with showing(*paths):
        text, table = render_runs(runs), _print_results(runs)
    write_whole(Path(output), text)
    return table


def render_runs(runs: Mapping[str, RecordedRun]) -> str:
    """The page, as text; the runs by name."""
    cards = (
        kit.card("runs", "Runs", _results_table(runs)),
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


def _results(
    runs: Mapping[str, RecordedRun],
) -> tuple[tuple[str, ...], dict[str, list[kit.Number]]]:
    """Names of columns, and the cells of each run: its last and best values, its speed."""
    names = dict.fromkeys(
        f"{metric.kind}/{metric.name}"
        for run in runs.values()
        for report in run.evaluations[-1:] or run.reports[-1:]
        for metric in report.metrics
        if metric.kind
    )
    evaluated = [name for name in names if name.startswith("eval/")] or [*names]
    kept = {run.record["best"] for run in runs.values() if run.record.get("best")}
    columns = ("Step", *evaluated)
    columns += (f"Best {comma_list(sorted(kept))}", "at step") if kept else ()
    columns += ("Time of a step", "Examples per second", "Goodput")
    cells = {}
    for name, run in runs.items():
        start, best = run.last_start, run.best or (None, None)
        cells[name] = [
            kit.number(run.step),
            *(kit.number(run.last(metric)) for metric in evaluated),
            *(map(kit.number, best) if kept else ()),
            kit.number(start.step_seconds, format_seconds),
            kit.number(start.examples_per_second, format_number),
            kit.number(start.goodput, "{:.0%}".format),
        ]
    return columns, cells


def _results_table(runs: Mapping[str, RecordedRun]) -> Markup:
    columns, cells = _results(runs)
    rows: list[list[kit.Entry]] = [
        [_label(position, name), run.state, *cells[name]]
        for position, (name, run) in enumerate(runs.items())
    ]
    return kit.sortable_table("runs", ("Run", "State", *columns), rows)


def _print_results(runs: Mapping[str, RecordedRun]) -> str:
    from rich.table import Table
    from rich.text import Text

    columns, cells = _results(runs)
    table = Table("Run", *columns, box=None)
    for name, row in cells.items():
        table.add_row(*map(Text, (name, *(cell.text for cell in row))))
    return render(table)


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
    """What a run may differ in, and from which step on where a later start changed it."""
    found = comparable(run.starts[0].facts)
    now = dict(found)
    for start in run.starts[1:]:
        before, now = now, comparable(start.facts)
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                since = f"from step {start.step:,}: {now.get(name, 'none')}"
                found[name] = f"{found.get(name, 'none')}; {since}"
    return found
