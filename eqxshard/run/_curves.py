"""The curves of runs on a page: their points, which the page's script draws."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..pages._format import format_number, format_value
from ..pages._kit import Markup, join, tag
from ._read_run import SPEED, Point, RecordedRun

#: The most points of a curve that are on the page.
MOST_POINTS = 600


def draw_curves(runs: Mapping[str, RecordedRun]) -> Markup:
    """A chart for each metric of some runs by name, with a legend if they are several."""
    charts = dict[str, list[dict[str, Any]]]()
    for number, (name, run) in enumerate(runs.items()):
        for (metric, kind), points in run.series.items():
            label = kind or metric
            style = {"eval": "eval c1", "train": "train c0"}.get(kind, "c2")
            if len(runs) > 1:
                label = f"{name}, {kind}" if kind else name
                style = f"{'train ' if kind == 'train' else ''}c{number % 8}"
            dotted = kind == "eval" or len(points) == 1
            curve = {"name": label, "run": number, "style": style, "dotted": dotted}
            curve["is_speed"] = metric == SPEED
            charts.setdefault(metric, []).append({**curve, **_columns(thin(points))})
    if SPEED in charts:  # It is the last that one looks for.
        charts[SPEED] = charts.pop(SPEED)
    if not charts:
        return tag("p", "Nothing is logged yet.")
    data = json.dumps([*charts.values()], separators=(",", ":"), allow_nan=False)
    return join(
        tag("noscript", tag("p", "Curves are drawn by JavaScript, which is off here.")),
        _controls(),
        tag("div", *[_chart(*each) for each in charts.items()], class_="charts"),
        # Within a script, only "<" could end it.
        tag(
            "script",
            Markup(data.replace("<", "\\u003c")),
            type="application/json",
            id="curves-data",
        ),
    )


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """At most this many points: the lowest and the highest of each stretch of a curve."""
    if len(points) <= most:
        return points
    # What is not finite is kept before a low, so that there is a gap.
    heights = [p.value if math.isfinite(p.value) else -math.inf for p in points]
    count, kept = most // 2 - 1, {0, len(points) - 1}
    for n in range(count):
        part = range(n * len(points) // count, (n + 1) * len(points) // count)
        kept |= {min(part, key=heights.__getitem__), max(part, key=heights.__getitem__)}
    return [points[i] for i in sorted(kept)]


def _columns(points: Sequence[Point]) -> dict[str, Any]:
    """The fields of points in six digits, as JSON has them: `None` for what is nan."""
    return {
        field: [float(f"{x:.6g}") if math.isfinite(x) else None for x in column]
        for field, column in zip(Point._fields, zip(*points), strict=True)
    } | {"step": [point.step for point in points]}


def _controls() -> Markup:
    """What only works with a script, which shows it."""
    over = {"step": "steps", "epoch": "epochs", "seconds": "time"}
    choices = [tag("option", text, value=name) for name, text in over.items()]
    zooms = {"in": "Zoom in", "out": "Zoom out", "reset": "Show all"}
    buttons = [tag("button", text, type="button", data_do=do) for do, text in zooms.items()]
    log = tag("label", tag("input", type="checkbox", id="curves-log"), "Logarithmic")
    select = tag("label", "Over ", tag("select", *choices, id="curves-over"))
    said = (
        "Drag across a curve to zoom in on it. With the keyboard, move to a curve by Tab: "
        "the arrows go from point to point, + and - zoom, Escape shows all."
    )
    row = tag("div", select, log, *buttons, class_="controls")
    return tag("div", row, tag("p", said), id="curves-controls", hidden=True)


def _chart(name: str, curves: Sequence[Mapping[str, Any]]) -> Markup:
    items, said = [], []
    for curve in curves:
        finite = [value for value in curve["value"] if value is not None]
        text = format_number if curve["is_speed"] else format_value
        last = text(finite[-1]) if finite else "not finite"
        stroke = tag("span", class_=f"stroke {curve['style']}")
        value = tag("span", last, class_="value")
        items.append(tag("li", stroke, f"{curve['name']} ", value, data_run=curve["run"]))
        said.append(f"{curve['name']} {last}")
    picture = tag("svg", viewBox="0 0 1000 400", preserveAspectRatio="none")
    frame = tag(
        "div",
        tag("div", picture, class_="plot"),
        class_="frame",
        aria_label=f"{name}: {', '.join(said)}",
        tabindex=0,
        role="group",
        aria_roledescription="chart",
    )
    return tag(
        "figure",
        tag("figcaption", name),
        tag("ul", *items, class_="key"),
        frame,
        tag("p", class_="unseen", aria_live="polite"),
        class_="chart",
    )
