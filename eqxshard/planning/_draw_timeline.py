"""The time line of a plan's page: what a device does above what its links do."""

from collections.abc import Sequence

from ..pages._bars import percent
from ..pages._format import format_seconds, round_number
from ..pages._html import Markup, tag
from ._collectives import PlannedCollective, join_axes
from ._timeline import PlannedSpan


def draw_timeline(
    spans: Sequence[PlannedSpan], collectives: Sequence[PlannedCollective]
) -> Markup:
    """What the device does above what the links of each axis do."""
    whole = max((span.end for span in spans), default=0.0)
    # Without what would be less than a pixel.
    visible = [span for span in spans if span.end - span.start > 1e-4 * whole]
    lanes: dict[str, list[PlannedSpan]] = {"device": []}
    for span in visible:
        if span.kind == "collective" and span.collective is not None:
            axes = join_axes(collectives[span.collective].axes)
            lanes.setdefault(f"{axes} links", []).append(span)
        elif span.kind in ("compute", "memory", "waiting"):
            lanes["device"].append(span)
    loops = [span for span in visible if span.kind == "loop"]
    rows = [
        tag(
            "div",
            tag("div", name, class_="name"),
            _lane([*loops, *content], collectives, whole),
            class_="lane",
        )
        for name, content in lanes.items()
    ]
    numbered = enumerate((span for span in spans if span.kind == "loop"), 1)
    marks = [_mark(n, span, whole) for n, span in numbered if span in loops]
    step = _tick(whole)
    ticks = [
        tag("span", format_seconds(n * step), style=f"left:{percent(n * step, whole)}")
        for n in range(int(0.97 * whole / step) + 1 if step else 0)
    ]
    head = tag("div", tag("div", class_="name"), tag("div", *marks, class_="marks"))
    foot = tag("div", tag("div", class_="name"), tag("div", *ticks, class_="ticks"))
    return tag("div", head, *rows, foot, class_="timeline")


def _mark(number: int, loop: PlannedSpan, whole: float) -> Markup:
    """A bracket above a loop, with as much text as it is wide for."""
    width = loop.end - loop.start
    name = f"loop {number} " if width > 0.12 * whole else ""
    times = [Markup("&times; "), f"{loop.times:,}"] if width > 0.05 * whole else []
    place = f"left:{percent(loop.start, whole)};width:{percent(width, whole)}"
    return tag("span", name, *times, style=place)


def _lane(
    spans: Sequence[PlannedSpan], collectives: Sequence[PlannedCollective], whole: float
) -> Markup:
    shapes = []
    for span in spans:
        style = span.kind
        if span.kind == "collective" and span.collective is not None:
            style = kind_style(collectives[span.collective].kind)
        tall = {"y": 0, "height": 28} if span.kind == "loop" else {"y": 4, "height": 20}
        x = f"{1000 * span.start / whole:.2f}"
        width = f"{max(1000 * (span.end - span.start) / whole, 0.8):.2f}"
        said = tag("title", _said(span, collectives))
        shapes.append(tag("rect", said, x=x, width=width, class_=style, **tall))
    options = {"viewBox": "0 0 1000 28", "preserveAspectRatio": "none"}
    return tag("svg", *shapes, **options, aria_hidden="true")


def _said(span: PlannedSpan, collectives: Sequence[PlannedCollective]) -> str:
    each = format_seconds(span.end - span.start)
    times = f", {span.times:,} times" if span.times > 1 else ""
    if span.kind == "loop":
        return f"one iteration of a loop: {each}{times}"
    if span.collective is None:
        what = {"compute": "arithmetic", "memory": "the device's memory"}.get(span.kind)
        return f"bound by {what}: {each}{times}"
    found = collectives[span.collective]
    causes = filter(None, [*found.leaves[:3], found.line])
    what = f"{found.kind} over {join_axes(found.axes)} ({', '.join(causes)})"
    head = "waiting for " if span.kind == "waiting" else ""
    return f"{head}{what}: {each}{times}"


def kind_style(kind: str) -> str:
    """The class that colours a kind of collective."""
    known = ("all-gather", "reduce-scatter", "all-reduce")
    return kind if kind in known else "other-kind"


def _tick(whole: float) -> float:
    """A round number of seconds, of which a time line has four to ten."""
    return round_number(whole / 4) if whole else 0.0
