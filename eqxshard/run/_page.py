"""The page of a run: one file of HTML, which loads nothing from elsewhere."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ..checkpoint._folder import CheckpointFolder
from ..loop._clock import format_duration
from ..pages import _kit as kit
from ..pages._format import format_count, format_number, format_seconds, format_value
from ..pages._kit import Markup, tag
from ..sharding._text import comma_list, format_bytes, format_mesh
from ..trackers._jsonl import read_whole_lines
from ..trackers._writing import write_whole
from ._changes import changes
from ._charts import draw_curves
from ._paths import RunPaths, read_values
from ._recorded_run import (
    SPEED,
    Point,
    RecordedRun,
    format_time,
    read_run,
    showing,
)

#: The most evaluations that are listed: the last ones.
_MOST_EVALUATIONS = 200


def save_page(folder: RunPaths, waiting: Sequence[str] = ()) -> None:
    """Write the page of a run from the files in its folder.

    **Arguments:**

    - `folder`: the paths of its files.
    - `waiting`: lines of its log that wait for room on a full disk.

    **Raises:**

    `ValueError` if it is not the folder of a run or its files make no sense, and `OSError`
    if the page cannot be written.
    """
    run = read_run(folder, waiting)
    with showing(folder.path):
        text = render_run(run)
    write_whole(folder.page, text)


def render_run(run: RecordedRun) -> str:
    """The page, as text."""
    plan = kit.card("plan", "Plan against measured", *_plan(run))
    cards = (
        kit.card("warnings", "Warnings", *_warnings(run)),
        kit.card("curves", "Curves", draw_curves(run)),
        kit.pair(kit.card("ledger", "Where the time went", *_ledger(run)), plan),
        kit.card("starts", "Starts", *_starts(run)),
        kit.card("metrics", "Metrics", *_metrics(run)),
        kit.card("evaluations", "Evaluations", *_evaluations(run)),
        kit.pair(
            kit.card("mesh", "Mesh", *_mesh(run)),
            kit.card("checkpoints", "Checkpoints", *_checkpoints(run)),
        ),
        kit.pair(
            kit.card("settings", "Settings", *_settings(run)),
            kit.card("versions", "Versions", *_versions(run)),
        ),
    )
    return kit.fill_page(
        title=run.title,
        about=" | ".join(filter(None, [run.title, _when(run)])),
        headline=run.headline,
        tiles=kit.draw_tiles(_tiles(run)),
        cards=cards,
    )


def _starts(run: RecordedRun) -> Iterator[Markup]:
    if len(run.starts) < 2:
        return
    rows = [
        (
            "" if start.time is None else format_time(start.time, run.zone),
            start.step,
            kit.number(start.step_seconds, format_seconds),
            kit.number(start.goodput, "{:.0%}".format),
            comma_list(changes(before.facts, start.facts)),
        )
        for before, start in zip([run.starts[0], *run.starts], run.starts)
    ]
    when = f"Started ({run.zone})"
    columns = (when, "From step", "Time of a step", "Goodput", "What changed")
    yield kit.draw_table("starts of the run", columns, rows)


def _when(run: RecordedRun) -> str:
    first, *others = run.starts
    if first.time is None:
        return f"last report {format_time(run.last_written, run.zone)} {run.zone}"
    said = f"started {format_time(first.time, run.zone)}"
    if others:
        steps = comma_list(f"{start.step:,}" for start in others)
        said += f", resumed at step {steps}"
    if run.ended is not None:
        said += f", ended {format_time(run.ended, run.zone)}"
    return f"{said} {run.zone}"


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
    start = run.last_start
    if start.step_seconds is not None:
        tiles["Step"] = (
            format_seconds(start.step_seconds),
            "median without the first report",
        )
    if start.examples_per_second is not None:
        unit = run.record.get("unit") or "examples"
        speed = format_number(start.examples_per_second)
        tiles[f"{unit.capitalize()} per second"] = speed, "median, too"
    if start.goodput is not None:
        whole = format_duration(sum(start.parts.values()))
        tiles["Goodput"] = f"{start.goodput:.0%}", f"of {whole}, in which steps ran"
    if memory := run.record.get("memory"):
        of = f", of {format_bytes(memory['limit'])}" if "limit" in memory else ""
        tiles["Memory of a device"] = format_bytes(memory["peak"]), f"at the peak{of}"
    if parameters := run.record.get("parameters"):
        tiles["Parameters"] = format_count(parameters), f"{parameters:,}"
    return tiles


def _warnings(run: RecordedRun) -> Iterator[Markup]:
    heard = [each for _, each in read_whole_lines(run.folder.warnings)]
    if heard:
        yield tag(
            "ul",
            *[
                tag("li", tag("strong", str(each.get("source"))), f": {each.get('text')}")
                for each in heard
            ],
        )


def _ledger(run: RecordedRun) -> Iterator[Markup]:
    start = run.last_start
    whole = sum(start.parts.values())
    if not whole:
        return
    parts = [
        kit.Part(
            "rest" if name == "other" else name, name, seconds, format_duration(seconds)
        )
        for name, seconds in sorted(start.parts.items(), key=lambda part: -part[1])
        if seconds
    ]
    since = f" since the start at step {start.step:,}" if start.step else ""
    said = f"{format_duration(whole)} of wall time{since}. Each moment counts for one part."
    if start.goodput is not None:
        said += f" Steps ran for {start.goodput:.0%} of it (device and dispatch)."
    yield tag("p", said)
    yield kit.draw_bar(parts, whole)
    yield kit.draw_legend(parts, whole, "Seconds of the run")


def _plan(run: RecordedRun) -> Iterator[Markup]:
    plan = read_values(run.folder.path / "plan.json")
    if not plan:
        return
    try:
        rows = [*_compare_with_plan(plan, run)]
    except (KeyError, TypeError, ValueError, AttributeError):
        said = "plan.json in the folder of this run is not a plan of this version."
        yield tag("p", said)
        return
    remark = (
        "The planned time is the least that a step can take, so real steps take longer. "
        "'About' is the time to expect on the plan's target."
    )
    columns = ("", "Plan", "Measured", "Ratio")
    yield kit.draw_table("plan against measured", columns, rows)
    yield tag("p", remark, class_="remark")


def _compare_with_plan(
    plan: Mapping[str, Any], run: RecordedRun
) -> Iterator[tuple[str, ...]]:
    """Rows of a name, the planned and the measured value, and their ratio if known."""
    record, time, start = run.record, plan["time"], run.last_start
    if devices := record.get("devices"):
        there = f"{plan['devices']} x {plan['target']['kind']}"
        yield "devices", there, f"{devices['count']} x {devices['kind']}", ""
        yield "mesh", format_mesh(plan["mesh"]), format_mesh(record.get("mesh") or {}), ""
    if batch_size := (record.get("settings") or {}).get("batch_size"):
        yield "batch size", str(plan["examples"]), str(batch_size), ""
    step, mfu = time and time["step"], plan["mfu"]
    seconds = start.step_seconds
    used = mfu * step / seconds if mfu and step and seconds else None
    peak = (record.get("memory") or {}).get("peak")
    speed = plan["examples_per_second"], start.examples_per_second
    if time and time.get("about"):
        about = time["about"]["step"]
        said = format_seconds(seconds) if seconds else "unknown"
        ratio = format_number(seconds / about) if seconds and about else ""
        yield "time of a step, about", format_seconds(about), said, ratio
    for name, planned, measured, text in (
        ("time of a step", step, seconds, format_seconds),
        ("examples per second", *speed, format_number),
        ("of the devices' peak", mfu, used, "{:.1%}".format),
        ("memory of a device", plan["memory"]["peak"], peak, format_bytes),
    ):
        shown = (text(value) if value else "unknown" for value in (planned, measured))
        ratio = format_number(measured / planned) if planned and measured else ""
        yield name, *shown, ratio


def _metrics(run: RecordedRun) -> Iterator[Markup]:
    rows = []
    for (name, kind), points in run.series.items():
        if name == SPEED:
            continue
        finite = [x for x in points if isfinite(x.value)] or [Point(0, nan)]
        low, high = (f(finite, key=lambda point: point.value) for f in (min, max))
        ends = finite[0].value, finite[-1].value
        lowest, highest = ((x.value, x.step or None) for x in (low, high))
        missing = len(points) - len([x for x in points if isfinite(x.value)])
        title = tag("code", "/".join(filter(None, (kind, name))))
        rows.append([title, *ends, *lowest, *highest, missing or None])
    columns = ("Metric", "First", "Last", "Lowest", "at step", "Highest", "at step")
    if rows:
        yield kit.draw_table("metrics", (*columns, "Not finite"), rows)


def _evaluations(run: RecordedRun) -> Iterator[Markup]:
    found = run.evaluations
    shown = found[-_MOST_EVALUATIONS:]
    metrics = [x for each in found for x in each.metrics if x.kind in ("eval", "ema")]
    names = list(dict.fromkeys(f"{metric.kind}/{metric.name}" for metric in metrics))
    if len(found) > len(shown):
        yield tag("p", f"The last {len(shown)} of {len(found):,}.")
    has_epochs = any("epoch" in each.values for each in shown)
    rows = []
    for each in shown:
        values = [each.values.get(name) for name in names]
        epoch = kit.number(each.values.get("epoch"), format_number)
        rows.append([each.step, *[epoch] * has_epochs, *values])
    if rows:
        heads = [name.removeprefix("eval/") for name in names]
        columns = ("Step", *["Epoch"] * has_epochs, *heads)
        yield kit.draw_table("evaluations", columns, rows)


def _mesh(run: RecordedRun) -> Iterator[Markup]:
    mesh, devices = run.record.get("mesh"), run.record.get("devices")
    if mesh is None or devices is None:
        return
    count, per_process = devices["count"], devices["per_process"]
    said = f"{count:,} x {devices['kind']}"
    if count > per_process:
        said += f" of {count // per_process:,} processes"
    yield tag("p", f"{said}.")
    if mesh:
        rows = [(axis, kit.Number(f"{size:,}")) for axis, size in mesh.items()]
        yield kit.draw_table("axes of the mesh", ("Axis", "Size"), rows)


def _checkpoints(run: RecordedRun) -> Iterator[Markup]:
    folder, found = CheckpointFolder(run.folder.checkpoints), []
    for step in folder.known_steps():
        # Another process may remove the checkpoint meanwhile, and it may be damaged.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            metrics = folder.description(step)["metrics"]
            files = [file.stat() for file in Path(folder.at(step)).rglob("*")]
            size = kit.number(sum(file.st_size for file in files), format_bytes)
            saved = datetime.fromtimestamp(max(x.st_mtime for x in files), run.zone)
            found.append(([step, size, format_time(saved, run.zone)], metrics))
    if found:
        names = [name for name in found[-1][1] if name.startswith("eval/")][:3]
        rows = [[*cells, *map(metrics.get, names)] for cells, metrics in found]
        columns = ("Step", "Size", f"Saved ({run.zone})", *names)
        yield kit.draw_table("checkpoints", columns, rows)


def _settings(run: RecordedRun) -> Iterator[Markup]:
    found = {"data": run.record.get("data")}
    settings = dict(run.record.get("settings") or {})
    # Users attach the page to issues, and this path may have somebody's name in it.
    settings.pop("output", None)
    for name, value in settings.items():
        found[f"settings.{name}" if name in found else name] = value
    shown = {
        name: str(value) for name, value in found.items() if value not in (None, "", [])
    }
    if shown:
        yield kit.settings_list(shown)


def _versions(run: RecordedRun) -> Iterator[Markup]:
    found = dict(run.record.get("versions") or {})
    if system := run.record.get("system"):
        found["system"] = system
    if found:
        yield kit.settings_list(found)
