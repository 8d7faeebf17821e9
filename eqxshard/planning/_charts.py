"""The pictures of a plan's page: its mesh, bars, and the time line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ._collectives import PlannedCollective
from ._format import format_seconds, join_axes
from ._html import Markup, tag
from ._timeline import PlannedSpan

_CELL, _GAP, _BLOCK_GAP, _DOTS = 26, 4, 20, 16
#: The most devices along an axis that are drawn: inside a block, and of blocks.
_INSIDE, _BLOCKS = 8, 2


class Part(NamedTuple):
    """A part of a bar: the class that colours it, its name, its size, also as text."""

    style: str
    name: str
    size: int | float
    text: str


def draw_bar(
    parts: Sequence[Part], whole: int | float, limit: int | float | None = None
) -> Markup:
    """A bar of parts, beside a mark at a limit."""
    said = ", ".join(f"{part.name} {part.text}" for part in parts)
    spans = [
        tag(
            "span",
            class_=f"fill {part.style}",
            style=f"width:{_percent(part.size, whole)}",
            title=f"{part.name}: {part.text}",
        )
        for part in parts
        if part.size > 0.002 * whole
    ]
    if limit is not None:
        spans.append(tag("span", class_="limit", style=f"left:{_percent(limit, whole)}"))
    return tag("div", *spans, class_="bar", role="img", aria_label=said)


def draw_legend(parts: Sequence[Part], whole: int | float, caption: str) -> Markup:
    """The parts of a bar as a table, with their shares."""
    rows = [
        tag(
            "tr",
            tag("th", tag("span", class_=f"swatch {part.style}"), part.name, scope="row"),
            tag("td", part.text),
            tag("td", f"{part.size / whole:.1%}" if whole else "", class_="share"),
        )
        for part in parts
    ]
    head = tag("caption", caption, class_="unseen")
    return tag("table", head, tag("tbody", *rows), class_="legend")


def draw_bars(parts: Sequence[Part], whole: int | float, caption: str) -> Markup:
    """A table with a bar in each row."""
    rows = [
        tag(
            "tr",
            tag("th", part.name, scope="row"),
            tag("td", part.text),
            tag("td", draw_bar([part], whole), class_="wide"),
        )
        for part in parts
    ]
    head = tag("caption", caption, class_="unseen")
    return tag("table", head, tag("tbody", *rows), class_="legend bars")


def draw_mesh(mesh: Mapping[str, int], per_host: int) -> Markup:
    """The devices of a mesh: the last two axes in blocks, two more between blocks."""
    names = [*mesh][-4:]
    sizes = [1] * (4 - len(names)) + [mesh[name] for name in names]
    names = [""] * (4 - len(names)) + names
    columns, width = _slots(sizes[3], _INSIDE, _CELL, _GAP)
    rows, height = _slots(sizes[2], _INSIDE, _CELL, _GAP)
    across, whole_width = _slots(sizes[1], _BLOCKS, width, _BLOCK_GAP)
    down, whole_height = _slots(sizes[0], _BLOCKS, height, _BLOCK_GAP)
    left, top = (sum(20 for name in x if name) for x in (names[0::2], names[1::2]))
    shapes = []
    for y in ((a, b, p + q) for a, p in down for b, q in rows):
        for x in ((a, b, p + q) for a, p in across for b, q in columns):
            at = (y[0], x[0], y[1], x[1])
            place = x[2] + left, y[2] + top
            shapes += _device(at, place, names, sizes, per_host)
    labels = {
        1: (left, 12, "→", ""),
        3: (left, top - 7, "→", ""),
        0: (12, top, "←", "rotate(-90)"),
        2: (left - 8, top, "←", "rotate(-90)"),
    }
    for number, (x, y, arrow, turn) in labels.items():
        if names[number]:
            text = f"{names[number]} = {sizes[number]:,}"
            text = f"{arrow} {text}" if turn else f"{text} {arrow}"
            move, anchor = f"translate({x} {y}) {turn}".strip(), "end" if turn else None
            shapes.append(tag("text", text, transform=move, text_anchor=anchor))
    # Labels may be longer than what they name.
    width, height = max(left + whole_width, 150), max(top + whole_height, left * 5)
    scale = 1.3 if width < 300 else 1.0
    said = ", ".join(f"{axis} of {size}" for axis, size in mesh.items())
    return tag(
        "svg",
        *shapes,
        class_="mesh",
        width=scale * width,
        height=scale * height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"The mesh: {said}",
    )


def _slots(
    count: int, most: int, size: int, gap: int
) -> tuple[list[tuple[int | None, int]], int]:
    """Where devices, or blocks of them, are drawn, and the length; `None` are dots."""
    whole = [*range(count)] if count <= most else [*range(most - 1), None, count - 1]
    slots, at = list[tuple[int | None, int]](), 0
    for number in whole:
        slots.append((number, at))
        at += (_DOTS if number is None else size) + gap
    return slots, at - gap


def _device(
    at: Sequence[int | None],
    place: tuple[int, int],
    names: Sequence[str],
    sizes: Sequence[int],
    per_host: int,
) -> Iterator[Markup]:
    x, y = place
    missing = [number for number, index in enumerate(at) if index is None]
    if len(missing) > 1:
        return
    if missing:
        inner, vertical = missing[0] >= 2, missing[0] % 2 == 0
        first = all(index in (0, None) for index in at[2:])
        if inner or first:
            dx, dy = (_CELL // 2, _DOTS - 2) if vertical else (_DOTS // 2, _CELL // 2 + 4)
            dots = "⋮" if vertical else "…"
            yield tag("text", dots, x=x + dx, y=y + dy, text_anchor="middle")
        return
    number = 0
    for index, size in zip(at, sizes, strict=True):
        number = number * size + (index or 0)
    where = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True) if name)
    host = number // per_host
    said = tag("title", f"device {number:,}: {where}; host {host:,}")
    even = "even" if host % 2 == 0 else "odd"
    shape = {"width": _CELL, "height": _CELL, "rx": 4}
    yield tag("rect", said, x=x, y=y, class_=even, **shape)
    if number < 10_000:
        label = {"x": x + _CELL / 2, "y": y + _CELL / 2 + 3.5}
        yield tag("text", str(number), class_="number", text_anchor="middle", **label)


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
        tag("span", format_seconds(n * step), style=f"left:{_percent(n * step, whole)}")
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
    place = f"left:{_percent(loop.start, whole)};width:{_percent(width, whole)}"
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
    if not whole:
        return 0.0
    power = 10.0 ** math.floor(math.log10(whole / 4))
    return next(n * power for n in (5, 2, 1) if n * power <= whole / 4)


def _percent(part: int | float, whole: int | float) -> str:
    return f"{100 * part / whole:.3f}%" if whole else "0%"
