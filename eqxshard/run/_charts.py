"""The curves of a run on its page, as SVGs with labels around them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..pages._format import format_number, format_value
from ..pages._kit import Markup, tag
from ._recorded_run import SPEED, Point, RecordedRun

#: The largest number of points that are drawn for a curve.
MOST_POINTS = 600
#: The size of an SVG in its own units; the page stretches it to its width.
_WIDTH, _HEIGHT = 1000, 400
#: Larger numbers are drawn at this height, so that the difference of two heights is still
#: finite.
_LARGEST = 1e300


def draw_curves(run: RecordedRun) -> Markup:
    """A chart for each metric of a run, over its steps."""
    charts = dict[str, dict[str, Sequence[Point]]]()
    for (metric, kind), points in run.series.items():
        charts.setdefault(metric, {})[kind] = thin(points)
    if SPEED in charts:  # Last: readers look for losses first.
        charts[SPEED] = charts.pop(SPEED)
    if not charts:
        return tag("p", "Nothing is logged yet.")
    found = charts.values()
    steps = [point.step for chart in found for points in chart.values() for point in points]
    ends = _span(steps, 0.015)
    figures = [_chart(name, curves, ends) for name, curves in charts.items()]
    return tag("div", *figures, class_="charts")


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """Thin a curve to at most `most` points: the lowest and highest of each stretch."""
    if len(points) <= most:
        return points
    # A value that is not finite counts as the lowest, so that it is kept and leaves a gap.
    heights = [p.value if math.isfinite(p.value) else -math.inf for p in points]
    count, kept = most // 2 - 1, {0, len(points) - 1}
    for n in range(count):
        part = range(n * len(points) // count, (n + 1) * len(points) // count)
        kept |= {min(part, key=heights.__getitem__), max(part, key=heights.__getitem__)}
    return [points[i] for i in sorted(kept)]


def _chart(
    name: str, curves: Mapping[str, Sequence[Point]], steps: tuple[float, float]
) -> Markup:
    values = [point.value for points in curves.values() for point in points]
    bottom, top = _span(filter(math.isfinite, values), 0.06)
    left, right = steps

    def across(step: int | float) -> float:
        return (step - left) / (right - left)

    def down(value: float) -> float:
        return (top - min(max(value, -_LARGEST), _LARGEST)) / (top - bottom)

    lines, labels, key, said = list[Markup](), list[Markup](), list[Markup](), list[str]()
    for tick in _ticks(left, right):
        lines.append(_line("grid", f"M{across(tick) * _WIDTH:.1f} 0V{_HEIGHT}"))
        place = f"left:{across(tick):.2%}"
        labels.append(tag("span", _label(tick), class_="x", style=place))
    for tick in _ticks(bottom, top):
        lines.append(_line("grid", f"M0 {down(tick) * _HEIGHT:.1f}H{_WIDTH}"))
        labels.append(tag("span", _label(tick), class_="y", style=f"top:{down(tick):.2%}"))
    for kind, points in curves.items():
        style = {"eval": "eval c1", "train": "train c0"}.get(kind, "c2")
        line, dots, pen = "", "", "M"
        for point in points:
            if not math.isfinite(point.value):
                pen = "M"
                continue
            x, y = across(point.step) * _WIDTH, down(point.value) * _HEIGHT
            line += f"{pen}{x:.1f} {y:.1f}"
            dots += f"M{x:.1f} {y:.1f}h0"
            pen = "L"
        lines.append(_line(f"line {style}", line))
        if kind == "eval" or len(points) == 1:
            lines.append(_line(f"dots {style}", dots))
        finite = [point.value for point in points if math.isfinite(point.value)]
        text = format_number if name == SPEED else format_value
        last, label = text(finite[-1]) if finite else "not finite", kind or name
        stroke = tag("span", class_=f"stroke {style}")
        key.append(tag("li", stroke, f"{label} ", tag("span", last, class_="value")))
        said.append(f"{label} {last}")
    picture = tag(
        "svg",
        *lines,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{name}: {', '.join(said)}",
    )
    return tag(
        "figure",
        tag("figcaption", name),
        tag("ul", *key, class_="key"),
        tag("div", tag("div", picture, *labels, class_="plot"), class_="frame"),
        class_="chart",
    )


def _line(style: str, path: str) -> Markup:
    return tag("path", d=path, class_=style)


def _span(values: Iterable[int | float], margin: float) -> tuple[float, float]:
    """The ends of an axis: the range of some values, and this part of it at each end."""
    found = [min(max(float(value), -_LARGEST), _LARGEST) for value in values] or [0.0]
    low, high = min(found), max(found)
    room = margin * (high - low)
    if high - low <= 1e-12 * max(abs(low), abs(high)) or high - low < 1 / _LARGEST:
        room = (abs(low) if abs(low) > 1 / _LARGEST else 1.0) / 2
    return low - room, high + room


def _ticks(low: float, high: float) -> Iterator[float]:
    """Three to six round numbers between the ends of an axis."""
    third = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(third))
    # The power may be rounded up beyond a third: then half of it is right.
    step = next(n * power for n in (5, 2, 1, 0.5) if n * power <= third)
    yield from (n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1))


def _label(tick: float) -> str:
    for least, each, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(tick) >= least:
            return f"{tick / each:.6g}{unit}"
    return f"{tick:.6g}"
