"""The page of a run: one file of HTML, which loads nothing from elsewhere."""

import shlex
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ..loop._clock import format_duration
from ..pages._bars import Part, draw_bar, draw_legend
from ..pages._format import format_bytes, format_seconds
from ..pages._html import Markup, join, tag
from ..pages._mesh import draw_mesh
from ..pages._parts import (
    card,
    draw_tiles,
    fill_page,
    number_cell,
    pair,
    plain_table,
    read_assets,
    scroller,
    settings_list,
    sortable_table,
)
from ..trackers._files import write_whole
from ._folder import RunFolder
from ._read_run import RecordedRun, read_run, showing
from ._run_curves import draw_curves, format_value
from ._versus_plan import compare_with_plan

#: The most evaluations that are listed: the last ones.
_MOST_EVALUATIONS = 200


def save_page(folder: RunFolder) -> None:
    """Write the page of a run, from what its folder has.

    **Raises:**

    `ValueError` if it is not the folder of a run, and `OSError` if it cannot be written.
    """
    run = read_run(folder)
    with showing(folder.path):
        text = render_run(run)
    write_whole(folder.page, text)


def render_run(run: RecordedRun) -> str:
    """The page, as text."""
    cards = (
        _warnings(run),
        _curves(run),
        pair(_ledger(run), _plan(run)),
        _metrics(run),
        _evaluations(run),
        pair(_mesh(run), _checkpoints(run)),
        pair(_settings(run), _versions(run)),
    )
    return fill_run_page(
        title=run.title,
        about=" | ".join(filter(None, [run.title, _when(run)])),
        headline=run.state,
        tiles=draw_tiles(_tiles(run)),
        cards=join(*cards),
    )


def fill_run_page(**parts: Any) -> str:
    """A page with curves."""
    own = read_assets("eqxshard.run")
    return fill_page(**parts, style=own["curves.css"], script=own["curves.js"])


def _when(run: RecordedRun) -> str:
    starts = run.record.get("starts") or []
    if not starts:
        return f"last report {run.written:%Y-%m-%d %H:%M}"
    said = f"started {_minute(starts[0]['time'])}"
    if len(starts) > 1:
        steps = ", ".join(f"{start['step']:,}" for start in starts[1:])
        said += f", resumed at step {steps}"
    ended = (run.record.get("ended") or {}).get("time")
    return f"{said}, ended {_minute(ended)}" if ended else said


def _minute(time: str) -> str:
    """A time of ISO 8601 without seconds and zone."""
    return time[:16].replace("T", " ")


def _tiles(run: RecordedRun) -> dict[str, tuple[str, str]]:
    tiles = dict[str, tuple[str, str]]()
    if run.evaluations:
        last = run.evaluations[-1]
        for metric in [each for each in last.metrics if each.kind == "eval"][:3]:
            where = f"evaluated at step {last.step:,}"
            tiles[f"Test {metric.name}"] = format_value(metric.value), where
    elif (loss := run.last("train/loss")) is not None:
        where = f"at step {run.reports[-1].step:,}"
        tiles["Training loss"] = format_value(loss), where
    if run.step_seconds is not None:
        tiles["Step"] = format_seconds(run.step_seconds), "the median, without the first"
    if run.examples_per_second is not None:
        unit = run.record.get("unit") or "examples"
        speed = format_value(run.examples_per_second)
        tiles[f"{unit.capitalize()} per second"] = speed, "the median, too"
    if run.goodput is not None:
        whole = format_duration(sum(run.parts.values()))
        tiles["Goodput"] = f"{run.goodput:.0%}", f"of {whole}: steps ran"
    if memory := run.record.get("memory"):
        of = f"of {format_bytes(memory['limit'])}" if "limit" in memory else ""
        tiles["Memory of a device"] = format_bytes(memory["peak"]), f"at the peak {of}"
    if parameters := run.record.get("parameters"):
        tiles["Parameters"] = _count(parameters), f"{parameters:,}"
    return tiles


def _count(number: int) -> str:
    """A large number in three digits."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number}"


def _warnings(run: RecordedRun) -> Markup:
    items = [
        tag("li", tag("strong", str(each.get("source", ""))), f": {each.get('text', '')}")
        for each in run.warnings
    ]
    content = [tag("ul", *items)] if items else []
    if run.crash_dump is not None:
        command = f"python -m eqxshard.replay {shlex.quote(str(run.crash_dump))} SCRIPT"
        said = "Steps were not finite, and one is kept. With your script, this finds where "
        said += "it began: "
        content.append(tag("p", said, tag("code", command)))
    return card("warnings", "Warnings", *content) if content else Markup("")


def _curves(run: RecordedRun) -> Markup:
    curves = draw_curves({run.path.name: run})
    if not curves:
        return card("curves", "Curves", tag("p", "Nothing is logged yet."))
    return card("curves", "Curves", curves)


def _ledger(run: RecordedRun) -> Markup:
    whole = sum(run.parts.values())
    if not whole:
        return Markup("")
    ordered = sorted(run.parts.items(), key=lambda part: -part[1])
    parts = [
        Part("rest" if name == "other" else name, name, seconds, format_duration(seconds))
        for name, seconds in ordered
        if seconds
    ]
    said = f"{format_duration(whole)} of wall time. Each moment counts for one part."
    if run.goodput is not None:
        said += f" Steps ran for {run.goodput:.0%} of it (device and dispatch)."
    legend = draw_legend(parts, whole, "Seconds of the run")
    return card(
        "ledger", "Where the time went", tag("p", said), draw_bar(parts, whole), legend
    )


def _plan(run: RecordedRun) -> Markup:
    if run.plan is None:
        return Markup("")
    try:
        found = compare_with_plan(run.plan, run)
    except (KeyError, TypeError, ValueError, AttributeError):
        said = "plan.json in the folder of this run is not a plan of this version."
        return card("plan", "Plan against measured", tag("p", said))
    rows = [
        tag("tr", tag("th", name, scope="row"), *[tag("td", cell) for cell in cells])
        for name, *cells in found.rows
    ]
    table = plain_table("Plan against measured", ("", "Plan", "Measured", "Ratio"), rows)
    said = [tag("p", text, class_="bad") for text in found.differences]
    notes = [tag("p", text, class_="remark") for text in found.notes]
    table = scroller("plan against measured", table)
    return card("plan", "Plan against measured", *said, table, *notes)


def _metrics(run: RecordedRun) -> Markup:
    found = dict[str, list[tuple[int, float]]]()
    for report in run.reports:
        for metric in report.metrics:
            name = f"{metric.kind}/{metric.name}" if metric.kind else metric.name
            found.setdefault(name, []).append((report.step, metric.value))
    rows = []
    for name, pairs in found.items():
        finite = [(step, value) for step, value in pairs if isfinite(value)]
        cells = [tag("th", tag("code", name), scope="row")]
        if finite:
            low, high = (f(finite, key=lambda pair: pair[1]) for f in (min, max))
            cells += [_value(finite[0][1]), _value(finite[-1][1])]
            for step, value in (low, high):
                cells += [_value(value), number_cell(f"{step:,}", step)]
        else:
            cells += [number_cell("", None)] * 6
        missing = len(pairs) - len(finite)
        rows.append(
            tag("tr", *cells, number_cell(f"{missing:,}" if missing else "", missing))
        )
    if not rows:
        return Markup("")
    columns = {"Metric": False, "First": True, "Last": True, "Lowest": True}
    columns |= {"at step": True, "Highest": True, "at step ": True, "Not finite": True}
    table = sortable_table("metrics", "Metrics", columns, rows, "metrics", ordered=None)
    return card("metrics", "Metrics", table)


def _value(value: float | None) -> Markup:
    if value is None or not isfinite(value):
        return number_cell("", None)
    return number_cell(format_value(value), value)


def _evaluations(run: RecordedRun) -> Markup:
    found = run.evaluations
    if not found:
        return Markup("")
    names = [m.name for each in found for m in each.metrics if m.kind == "eval"]
    names, rows = list(dict.fromkeys(names)), []
    for each in found[-_MOST_EVALUATIONS:]:
        cells = [
            number_cell(f"{each.step:,}", each.step),
            number_cell("" if each.epoch is None else f"{each.epoch:.4g}", each.epoch),
            *[_value(each.values.get(f"eval/{name}")) for name in names],
        ]
        rows.append(tag("tr", *cells))
    columns = {"Step": True, "Epoch": True} | dict.fromkeys(names, True)
    more = len(found) - len(rows)
    said = [tag("p", f"The last {len(rows)} of {len(found):,}.")] if more else []
    table = sortable_table(
        "evaluations", "Evaluations", columns, rows, "evaluations", ordered=None
    )
    return card("evaluations", "Evaluations", *said, table)


def _mesh(run: RecordedRun) -> Markup:
    mesh, devices = run.record.get("mesh"), run.record.get("devices")
    if mesh is None or not isinstance(devices, Mapping):
        return Markup("")
    said = f"{devices['count']:,} x {devices['kind']}"
    per_process = devices["per_process"]
    if devices["count"] > per_process:
        said += (
            f" of {devices['count'] // per_process:,} processes; neighbouring processes "
            "differ in shade"
        )
    rows = [
        tag("tr", tag("th", axis, scope="row"), tag("td", f"{size:,}"))
        for axis, size in mesh.items()
    ]
    picture = scroller("picture of the mesh", draw_mesh(mesh, per_process))
    table = plain_table("Axes of the mesh", ("Axis", "Size"), rows)
    return card("mesh", "Mesh", tag("p", f"{said}."), picture, *([table] if rows else []))


def _checkpoints(run: RecordedRun) -> Markup:
    if not run.checkpoints:
        return Markup("")
    names = [m for m in run.checkpoints[-1].metrics if m.startswith("eval/")][:3]
    rows = [
        tag(
            "tr",
            number_cell(f"{each.step:,}", each.step),
            number_cell(format_bytes(each.nbytes), each.nbytes),
            tag("td", f"{each.time:%Y-%m-%d %H:%M:%S}"),
            *[_value(each.metrics.get(name)) for name in names],
        )
        for each in run.checkpoints
    ]
    columns = {"Step": True, "Size": True, "Saved": False} | dict.fromkeys(names, True)
    table = sortable_table(
        "checkpoints", "Checkpoints", columns, rows, "checkpoints", ordered=None
    )
    return card("checkpoints", "Checkpoints", table)


def _settings(run: RecordedRun) -> Markup:
    found = {
        k: str(v) for k, v in (run.record.get("settings") or {}).items() if v is not None
    }
    if data := run.record.get("data"):
        found = {"data": str(data)} | found
    if command := run.record.get("command"):
        found = {"command": command} | found
    return card("settings", "Settings", settings_list(found)) if found else Markup("")


def _versions(run: RecordedRun) -> Markup:
    found = dict(run.record.get("versions") or {})
    if host := run.record.get("host"):
        found["host"] = host
    return card("versions", "Versions", settings_list(found)) if found else Markup("")


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A short name for each run, unlike those of the others."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError("two of the folders are the same; give each run once.")
