"""The page of a run: one file of HTML, which loads nothing from elsewhere."""

import shlex
from collections.abc import Mapping
from math import isfinite

from ..loop._clock import format_duration
from ..pages._format import format_bytes, format_seconds, format_value
from ..pages._html import Markup, tag
from ..pages._kit import (
    Number,
    Part,
    card,
    draw_bar,
    draw_legend,
    draw_tiles,
    fill_page,
    pair,
    plain_table,
    scroller,
    settings_list,
    sortable_table,
)
from ..pages._mesh import draw_mesh
from ..trackers._files import write_whole
from ._folder import RunFolder
from ._read_run import RecordedRun, read_run, showing
from ._run_curves import draw_curves
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
    return fill_page(
        title=run.title,
        about=" | ".join(filter(None, [run.title, _when(run)])),
        headline=run.state,
        tiles=draw_tiles(_tiles(run)),
        cards=cards,
    )


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
    columns = ("", "Plan", "Measured", "Ratio")
    table = plain_table("Plan against measured", columns, found.rows)
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
    if not found:
        return Markup("")
    rows = []
    for name, points in found.items():
        finite = [(step, value) for step, value in points if isfinite(value)]
        cells = [Number("", None)] * 6
        if finite:
            low, high = (f(finite, key=lambda point: point[1]) for f in (min, max))
            cells = [_value(finite[0][1]), _value(finite[-1][1])]
            cells += [_value(low[1]), _step(low[0]), _value(high[1]), _step(high[0])]
        missing = len(points) - len(finite)
        left_out = Number(f"{missing:,}" if missing else "", missing)
        rows.append([tag("code", name), *cells, left_out])
    columns = ("Metric", "First", "Last", "Lowest", "at step", "Highest", "at step")
    table = sortable_table("metrics", (*columns, "Not finite"), rows)
    return card("metrics", "Metrics", table)


def _value(value: float | None) -> Number:
    if value is None or not isfinite(value):
        return Number("", None)
    return Number(format_value(value), value)


def _step(step: int) -> Number:
    return Number(f"{step:,}", step)


def _evaluations(run: RecordedRun) -> Markup:
    found = run.evaluations
    if not found:
        return Markup("")
    names = dict.fromkeys(m.name for x in found for m in x.metrics if m.kind == "eval")
    rows = [
        [
            _step(each.step),
            Number("" if each.epoch is None else f"{each.epoch:.4g}", each.epoch),
            *[_value(each.values.get(f"eval/{name}")) for name in names],
        ]
        for each in found[-_MOST_EVALUATIONS:]
    ]
    more = len(found) > len(rows)
    said = [tag("p", f"The last {len(rows)} of {len(found):,}.")] if more else []
    table = sortable_table("evaluations", ("Step", "Epoch", *names), rows)
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
    picture = scroller("picture of the mesh", draw_mesh(mesh, per_process))
    axes = [(axis, f"{size:,}") for axis, size in mesh.items()]
    table = [plain_table("Axes of the mesh", ("Axis", "Size"), axes)] if axes else []
    return card("mesh", "Mesh", tag("p", f"{said}."), picture, *table)


def _checkpoints(run: RecordedRun) -> Markup:
    if not run.checkpoints:
        return Markup("")
    names = [m for m in run.checkpoints[-1].metrics if m.startswith("eval/")][:3]
    rows = [
        [
            _step(each.step),
            Number(format_bytes(each.nbytes), each.nbytes),
            f"{each.time:%Y-%m-%d %H:%M:%S}",
            *[_value(each.metrics.get(name)) for name in names],
        ]
        for each in run.checkpoints
    ]
    table = sortable_table("checkpoints", ("Step", "Size", "Saved", *names), rows)
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
