"""The page of a run: one file of HTML, which loads nothing from elsewhere."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from ..loop._clock import format_duration
from ..pages._format import format_bytes, format_seconds, format_value
from ..pages._html import Markup, tag
from ..pages._kit import (
    Cell,
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
from ..sharding._text import format_mesh
from ..trackers._files import write_whole
from ._curves import draw_curves
from ._folder import RunFolder
from ._read_run import RecordedRun, read_run, showing

_NOTHING = Markup("")
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
        card("curves", "Curves", draw_curves({run.path.name: run})),
        pair(_ledger(run), _plan(run)),
        _metrics(run),
        _evaluations(run),
        pair(_mesh(run), _checkpoints(run)),
        pair(_settings(run), _versions(run)),
    )
    return fill_page(
        title=run.title,
        about=" | ".join(filter(None, [run.title, _when(run)])),
        headline=run.headline,
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
        said = (
            "Steps were not finite, and one is kept. With your script, this finds where it "
            "began: "
        )
        content.append(tag("p", said, tag("code", command)))
    return card("warnings", "Warnings", *content) if content else _NOTHING


def _ledger(run: RecordedRun) -> Markup:
    whole = sum(run.parts.values())
    if not whole:
        return _NOTHING
    ordered = sorted(run.parts.items(), key=lambda part: -part[1])
    parts = [
        Part("rest" if name == "other" else name, name, seconds, format_duration(seconds))
        for name, seconds in ordered
        if seconds
    ]
    said = f"{format_duration(whole)} of wall time. Each moment counts for one part."
    if run.goodput is not None:
        said += f" Steps ran for {run.goodput:.0%} of it (device and dispatch)."
    bar, legend = draw_bar(parts, whole), draw_legend(parts, whole, "Seconds of the run")
    return card("ledger", "Where the time went", tag("p", said), bar, legend)


def _plan(run: RecordedRun) -> Markup:
    if run.plan is None:
        return _NOTHING
    title = "Plan against measured"
    try:
        rows = [*compare_with_plan(run.plan, run)]
    except (KeyError, TypeError, ValueError, AttributeError):
        said = "plan.json in the folder of this run is not a plan of this version."
        return card("plan", title, tag("p", said))
    table = plain_table(title, ("", "Plan", "Measured", "Ratio"), rows)
    remark = (
        "The time of a plan is a roofline, so real steps take longer. Plans of a Target "
        "whose efficiency is planned over measured time are estimates."
    )
    scrolling = scroller("plan against measured", table)
    return card("plan", title, scrolling, tag("p", remark, class_="remark"))


def compare_with_plan(
    plan: Mapping[str, Any], run: RecordedRun
) -> Iterator[tuple[str, ...]]:
    """A name, what was planned, what was measured, and their ratio if they are numbers.

    **Arguments:**

    - `plan`: what [`eqxshard.Plan.to_json`][] makes.
    - `run`: a run of that step.
    """

    def pair_of(name: str, planned: Any, measured: Any, text: Any) -> tuple[str, ...]:
        ratio = f"{measured / planned:.3g}" if planned and measured else ""
        shown = (text(value) if value else "unknown" for value in (planned, measured))
        return (name, *shown, ratio)

    record, time = run.record, plan["time"]
    devices = record.get("devices")
    if devices is not None:
        there = f"{plan['devices']} x {plan['target']['kind']}"
        yield "devices", there, f"{devices['count']} x {devices['kind']}", ""
        yield "mesh", format_mesh(plan["mesh"]), format_mesh(record.get("mesh") or {}), ""
    if "batch_size" in record:
        yield "batch size", str(plan["examples"]), str(record["batch_size"]), ""
    planned, measured = time and time["step"], run.step_seconds
    yield pair_of("time of a step", planned, measured, format_seconds)
    speed = plan["examples_per_second"]
    yield pair_of("examples per second", speed, run.examples_per_second, "{:,.4g}".format)
    mfu = plan["mfu"]
    used = mfu * planned / measured if mfu and planned and measured else None
    yield pair_of("of the devices' peak", mfu, used, "{:.1%}".format)
    memory = (record.get("memory") or {}).get("peak")
    yield pair_of("memory of a device", plan["memory"]["peak"], memory, format_bytes)


def _metrics(run: RecordedRun) -> Markup:
    found = dict[str, list[tuple[int, float]]]()
    for report in run.reports:
        for metric in report.metrics:
            name = f"{metric.kind}/{metric.name}" if metric.kind else metric.name
            found.setdefault(name, []).append((report.step, metric.value))
    if not found:
        return _NOTHING
    rows = []
    for name, points in found.items():
        finite = [(step, value) for step, value in points if isfinite(value)]
        cells = [number(None)] * 6
        if finite:
            first, last = finite[0], finite[-1]
            low, high = (f(finite, key=lambda point: point[1]) for f in (min, max))
            cells = [number(first[1]), number(last[1])]
            cells += [number(low[1]), number(low[0]), number(high[1]), number(high[0])]
        missing = len(points) - len(finite)
        rows.append([tag("code", name), *cells, number(missing or None)])
    columns = ("Metric", "First", "Last", "Lowest", "at step", "Highest", "at step")
    table = sortable_table("metrics", (*columns, "Not finite"), rows)
    return card("metrics", "Metrics", table)


def _evaluations(run: RecordedRun) -> Markup:
    found = run.evaluations
    if not found:
        return _NOTHING
    kinds = [m for each in found for m in each.metrics if m.kind == "eval"]
    names = list(dict.fromkeys(f"eval/{metric.name}" for metric in kinds))
    rows = [
        [*map(number, (each.step, each.epoch, *map(each.values.get, names)))]
        for each in found[-_MOST_EVALUATIONS:]
    ]
    said = f"The last {len(rows)} of {len(found):,}."
    more = [tag("p", said)] if len(found) > len(rows) else []
    titles = [name.removeprefix("eval/") for name in names]
    table = sortable_table("evaluations", ("Step", "Epoch", *titles), rows)
    return card("evaluations", "Evaluations", *more, table)


def number(value: int | float | None, text: Callable[[Any], str] = format_value) -> Number:
    """A cell of a number; empty if it is not known, or not finite."""
    if value is None or not isfinite(value):
        return Number("", None)
    return Number(text(value), value)


def _mesh(run: RecordedRun) -> Markup:
    mesh, devices = run.record.get("mesh"), run.record.get("devices")
    if mesh is None or not isinstance(devices, Mapping):
        return _NOTHING
    said = f"{devices['count']:,} x {devices['kind']}"
    per_process = devices["per_process"]
    if devices["count"] > per_process:
        said += (
            f" of {devices['count'] // per_process:,} processes; neighbouring processes "
            "differ in shade"
        )
    rows = [(axis, f"{size:,}") for axis, size in mesh.items()]
    picture = scroller("picture of the mesh", draw_mesh(mesh, per_process))
    table = plain_table("Axes of the mesh", ("Axis", "Size"), rows)
    return card("mesh", "Mesh", tag("p", f"{said}."), picture, *([table] if rows else []))


def _checkpoints(run: RecordedRun) -> Markup:
    if not run.checkpoints:
        return _NOTHING
    names = [m for m in run.checkpoints[-1].metrics if m.startswith("eval/")][:3]
    rows: list[list[Cell]] = [
        [
            number(each.step),
            number(each.nbytes, format_bytes),
            f"{each.time:%Y-%m-%d %H:%M:%S}",
            *[number(each.metrics.get(name)) for name in names],
        ]
        for each in run.checkpoints
    ]
    table = sortable_table("checkpoints", ("Step", "Size", "Saved", *names), rows)
    return card("checkpoints", "Checkpoints", table)


def _settings(run: RecordedRun) -> Markup:
    record = run.record
    found = {"command": record.get("command"), "data": record.get("data")}
    found |= record.get("settings") or {}
    shown = {name: str(value) for name, value in found.items() if value not in (None, "")}
    return card("settings", "Settings", settings_list(shown)) if shown else _NOTHING


def _versions(run: RecordedRun) -> Markup:
    found = dict(run.record.get("versions") or {})
    if host := run.record.get("host"):
        found["host"] = host
    return card("versions", "Versions", settings_list(found)) if found else _NOTHING


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A short name for each run, unlike those of the others."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError("two of the folders are the same; give each run once.")
