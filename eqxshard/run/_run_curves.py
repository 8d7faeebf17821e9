"""The curves of runs on a page: pictures that need no script, and their points for one."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..pages._format import round_number
from ..pages._html import Markup, join, tag
from ._read_run import RecordedRun

#: The most points of a curve that are on the page.
MOST_POINTS = 600
#: The size of a picture in its own units; it is stretched to the room that it gets.
_WIDTH, _HEIGHT = 1000, 400
_SPEED = "examples per second"
#: The largest value, and the smallest difference, that an axis shows: those of 64-bit
#: floats themselves leave no room to calculate with.
_LARGEST, _SMALLEST = 1e300, 1e-300


class Point(NamedTuple):
    """A value that was logged at a step; nan if it was not finite."""

    step: int
    value: float
    epoch: float | None
    seconds: float


@dataclass(frozen=True)
class Series:
    """A curve.

    - `name`: what the key says, such as `train`.
    - `run`: the number of its run on the page.
    - `style`: the classes that draw it.
    - `points`: in order.
    - `is_dotted`: whether each point is marked.
    """

    name: str
    run: int
    style: str
    points: Sequence[Point]
    is_dotted: bool


def draw_curves(runs: Mapping[str, RecordedRun]) -> Markup:
    """A chart for each metric of some runs by name, with a legend if they are several."""
    charts = dict[str, list[Series]]()
    for number, (name, run) in enumerate(runs.items()):
        for (metric, kind), points in _points(run).items():
            label = kind or metric
            style = {"eval": "eval c1", "train": "train c0"}.get(kind, "c2")
            if len(runs) > 1:
                label = f"{name}, {kind}" if kind else name
                style = f"{'train ' if kind == 'train' else ''}c{number % 8}"
            dotted = kind == "eval" or len(points) == 1
            series = Series(label, number, style, thin(points), dotted)
            charts.setdefault(metric, []).append(series)
    if _SPEED in charts:  # It is the last that one looks for.
        charts[_SPEED] = charts.pop(_SPEED)
    if not charts:
        return Markup("")
    data = [
        {"name": name, "series": [*map(_to_json, series)]}
        for name, series in charts.items()
    ]
    # Within a script, only this would end it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return join(
        _controls(),
        tag("div", *[_chart(*each) for each in charts.items()], class_="charts"),
        tag("script", Markup(text), type="application/json", id="curves-data"),
    )


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """At most this many points: the lowest and the highest of each stretch of a curve."""
    if len(points) <= most:
        return points
    count, kept = most // 2 - 1, [0, len(points) - 1]
    for n in range(count):
        part = range(n * len(points) // count, (n + 1) * len(points) // count)
        # What is not finite is kept before a low, so that there is a gap.
        kept.append(min(part, key=lambda i: _lowest(points[i].value)))
        kept.append(max(part, key=lambda i: _highest(points[i].value)))
    return [points[i] for i in sorted(set(kept))]


def _lowest(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _highest(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _points(run: RecordedRun) -> dict[tuple[str, str], list[Point]]:
    """The values of each metric and kind, such as `("loss", "train")`."""
    found, seconds = dict[tuple[str, str], list[Point]](), 0.0
    for report in run.reports:
        seconds += sum(report.parts.values())
        named = {(each.name, each.kind): each.value for each in report.metrics}
        if "train/examples_per_second" in report.values:
            named[_SPEED, "train"] = report.values["train/examples_per_second"]
        for key, value in named.items():
            point = Point(report.step, value, report.epoch, seconds)
            found.setdefault(key, []).append(point)
    return found


def _to_json(series: Series) -> dict[str, Any]:
    points = series.points
    return {
        "name": series.name,
        "run": series.run,
        "style": series.style,
        "dotted": series.is_dotted,
        "step": [point.step for point in points],
        "epoch": [None if p.epoch is None else float(f"{p.epoch:.6g}") for p in points],
        "seconds": [float(f"{point.seconds:.6g}") for point in points],
        "value": [
            float(f"{p.value:.6g}") if math.isfinite(p.value) else None for p in points
        ],
    }


def _controls() -> Markup:
    """What only works with a script, which shows it."""
    choices = [
        tag("option", text, value=name)
        for name, text in (("step", "steps"), ("epoch", "epochs"), ("seconds", "time"))
    ]
    buttons = [
        tag("button", text, type="button", data_do=do)
        for do, text in (("in", "Zoom in"), ("out", "Zoom out"), ("reset", "Show all"))
    ]
    log = tag("label", tag("input", type="checkbox", id="curves-log"), "Logarithmic")
    over = tag("label", "Over ", tag("select", *choices, id="curves-over"))
    said = (
        "Drag across a curve to zoom in on it. With the keyboard, move to a curve by Tab: "
        "the arrows go from point to point, + and - zoom, Escape shows all."
    )
    row = tag("div", over, log, *buttons, class_="controls")
    return tag("div", row, tag("p", said), id="curves-controls", hidden=True)


def _chart(name: str, series: Sequence[Series]) -> Markup:
    key = [
        tag(
            "li",
            tag("span", class_=f"stroke {each.style}"),
            f"{each.name} ",
            tag("span", _last(each), class_="value"),
            data_run=each.run,
        )
        for each in series
    ]
    said = f"{name}: " + ", ".join(f"{each.name} {_last(each)}" for each in series)
    plot = tag("div", _picture(series), class_="plot")
    focus = {"tabindex": 0, "role": "group", "aria_roledescription": "chart"}
    return tag(
        "figure",
        tag("figcaption", name),
        tag("ul", *key, class_="key"),
        tag("div", plot, class_="frame", aria_label=said, **focus),
        tag("p", class_="unseen", aria_live="polite"),
        class_="chart",
    )


def _last(series: Series) -> str:
    found = [point.value for point in series.points if math.isfinite(point.value)]
    return format_value(found[-1]) if found else "not finite"


def format_value(value: int | float) -> str:
    """A metric in four digits."""
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def _picture(series: Sequence[Series]) -> Markup:
    """The curves over all steps, with ticks."""
    points = [point for each in series for point in each.points]
    values = [point.value for point in points if math.isfinite(point.value)] or [0.0]
    x0, x1 = _span([point.step for point in points], 0.015)
    y0, y1 = _span(values, 0.06)
    shapes, labels = [], []
    for tick in _ticks(x0, x1):
        x = (tick - x0) / (x1 - x0)
        shapes.append(tag("path", d=f"M{x * _WIDTH:.1f} 0V{_HEIGHT}", class_="grid"))
        labels.append(tag("span", _label(tick), class_="x", style=f"left:{x:.2%}"))
    for tick in _ticks(y0, y1):
        y = (y1 - tick) / (y1 - y0)
        shapes.append(tag("path", d=f"M0 {y * _HEIGHT:.1f}H{_WIDTH}", class_="grid"))
        labels.append(tag("span", _label(tick), class_="y", style=f"top:{y:.2%}"))

    def place(point: Point) -> str:
        x = (point.step - x0) / (x1 - x0) * _WIDTH
        return f"{x:.1f} {(y1 - point.value) / (y1 - y0) * _HEIGHT:.1f}"

    for each in series:
        pen, parts = "M", []
        for point in each.points:
            if math.isfinite(point.value):
                parts.append(pen + place(point))
            pen = "L" if math.isfinite(point.value) else "M"
        shapes.append(tag("path", d="".join(parts), class_=f"line {each.style}"))
        if each.is_dotted:
            finite = filter(lambda point: math.isfinite(point.value), each.points)
            dots = "".join(f"M{place(point)}h0" for point in finite)
            shapes.append(tag("path", d=dots, class_=f"dots {each.style}"))
    options = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "preserveAspectRatio": "none"}
    return join(tag("svg", *shapes, **options, aria_hidden="true"), *labels)


def _span(values: Sequence[int | float], margin: float) -> tuple[float, float]:
    """The ends of an axis for some values."""
    low, high = max(min(values), -_LARGEST), min(max(values), _LARGEST)
    room = margin * (high - low)
    if high - low < _SMALLEST:
        room = max(abs(low), abs(high)) / 2
        room = room if room > _SMALLEST else 0.5
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers between two others."""
    step = round_number((high - low) / 3)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(tick: float) -> str:
    size = abs(tick)
    for each, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= each:
            return f"{tick / min(each, 1e3 if unit == 'k' else each):.6g}{unit}"
    return f"{tick:.6g}"
