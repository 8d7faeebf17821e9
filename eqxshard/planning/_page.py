"""A plan as one page of HTML, which loads nothing from elsewhere."""

import math
from collections.abc import Iterator, Sequence

from ..compiled._collective import join_axes
from ..pages._bars import Part, draw_bar, draw_bars, draw_legend
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
    scroller,
    settings_list,
    sortable_table,
)
from ..sharding._text import format_mesh
from ._plan import Plan
from ._targets import how_sure
from ._timeline import PlannedSpan


def render_page(plan: Plan) -> str:
    """The page, as text."""
    mesh = format_mesh(plan.mesh)
    devices = f"{plan.devices:,} x {plan.target.kind}"
    cards = (
        _findings(plan),
        _time(plan),
        pair(_mesh(plan), _memory(plan)),
        _traffic(plan),
        _collectives(plan),
        _leaves(plan),
        pair(_notes(plan), _settings(plan)),
    )
    return fill_page(
        title=f"{devices}: {mesh}",
        about=f"{devices}, {mesh}, compiled by the backend {plan.backend}",
        headline=_headline(plan),
        tiles=_tiles(plan),
        cards=join(*cards),
    )


def _headline(plan: Plan) -> str:
    if plan.fits is False:
        missing = format_bytes(-(plan.memory.left or 0))
        return f"It does not fit: each device lacks {missing}"
    if plan.time is None or not plan.time.step:
        return f"A step needs {format_bytes(plan.memory.peak)} of each device"
    step = format_seconds(plan.time.step).replace(" ", "\u00a0")
    return f"A step takes {how_sure(plan.target)} {step}, bound by {plan.time.bound}"


def _tiles(plan: Plan) -> Markup:
    tiles = dict[str, tuple[str, str]]()
    if plan.time is not None and plan.time.step:
        tiles[f"Step, {how_sure(plan.target)}"] = (
            format_seconds(plan.time.step),
            f"bound by {plan.time.bound}",
        )
        if plan.tokens_per_second is not None:
            each = plan.tokens_per_second / plan.devices
            tiles["Tokens per second"] = (
                f"{plan.tokens_per_second:,.0f}",
                f"{each:,.0f} on each device",
            )
        else:
            speed = f"{plan.examples_per_second:,.4g}"
            tiles["Examples per second"] = speed, f"{plan.examples:,} in a batch"
    memory = plan.memory
    of = "" if memory.device is None else f"of {format_bytes(memory.device)}: "
    fits = {None: "", True: "it fits", False: "it does not fit"}[plan.fits]
    tiles["Memory of a device"] = format_bytes(memory.peak), f"{of}{fits}"
    if plan.mfu is not None:
        tiles["MFU"] = f"{plan.mfu:.0%}", "of the peak, at that speed"
    return draw_tiles(tiles)


def _time(plan: Plan) -> Markup:
    time = plan.time
    if time is None or not time.step:
        return Markup("")
    parts = [_seconds_part("compute", "compute", time.compute)]
    if time.memory is not None:
        parts.append(_seconds_part("memory", "memory", time.memory))
    links = time.links if time.waiting is None else time.waiting
    words = "links" if time.waiting is None else "waiting for links"
    for axes, seconds in sorted(links.items(), key=lambda link: -link[1]):
        if seconds:
            parts.append(_seconds_part("waiting", f"{words}: {axes}", seconds))
    if time.waiting is None:
        said = (
            "Without a schedule of the target: at best, all is hidden behind what takes "
            "the longest."
        )
        content = [draw_bars(parts, time.step, "Seconds of a step")]
    else:
        said = "A roofline over the compiler's schedule. Real steps take longer."
        legend = draw_legend(parts, time.step, "Seconds of a step")
        content = [draw_bar(parts, time.step), legend, _loops(plan.timeline or ())]
    return card("time", "Time of a step", tag("p", said), *content)


def _seconds_part(style: str, name: str, seconds: int | float) -> Part:
    return Part(style, name, seconds, format_seconds(seconds))


def _mesh(plan: Plan) -> Markup:
    per_host, target = plan.target.per_host, plan.target
    rows, stride = [], 1
    for axis, size in reversed([*plan.mesh.items()]):
        within, beyond = stride < per_host, stride * size > per_host
        stride *= size
        where = " and ".join(
            f"{name}, {speed / 1e9:,.0f} GB/s"
            for name, speed, uses in (
                ("within a host", target.link, within),
                ("between hosts", target.network, beyond),
            )
            if uses and speed is not None
        )
        cells = tag("th", axis, scope="row"), tag("td", f"{size:,}"), tag("td", where)
        rows.insert(0, tag("tr", *cells))
    hosts = -(-plan.devices // per_host)
    said = f"{plan.devices:,} devices"
    if hosts > 1:
        said += f" on {hosts:,} hosts of {per_host:,}; neighbouring hosts differ in shade"
    if len(plan.mesh) > 4:
        said += f"; the picture is without {', '.join([*plan.mesh][:-4])}"
    table = plain_table("Axes of the mesh", ("Axis", "Size", "Links"), rows)
    picture = scroller("picture of the mesh", draw_mesh(plan.mesh, per_host))
    return card("mesh", "Mesh", tag("p", f"{said}."), picture, table)


def _memory(plan: Plan) -> Markup:
    memory = plan.memory
    named = {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "other": memory.other_state,
        "batch": memory.batch,
        "temporaries": memory.temporaries,
    }
    names = {"optimizer": "optimizer state", "other": "other state"}
    named["outputs"] = max(memory.peak - sum(named.values()), 0)
    parts = [
        Part(style, names.get(style, style), size, format_bytes(size))
        for style, size in named.items()
        if size or style != "outputs"
    ]
    whole = max(memory.device or 0, memory.peak)
    if memory.left is not None and memory.left >= 0:
        parts.append(Part("left", "left", memory.left, format_bytes(memory.left)))
    limit = memory.device if plan.fits is False else None
    said = f"{format_bytes(memory.peak)} at the peak"
    if memory.device is not None:
        said += f", of {format_bytes(memory.device)}"
    gradients = (
        f"All gradients at once are {format_bytes(memory.gradients)}. They are "
        "temporaries, and some may be gone before others are made."
    )
    if memory.host:
        gradients += f" What is offloaded takes {format_bytes(memory.host)} of the host."
    return card(
        "memory",
        "Memory of a device",
        tag("p", f"{said}."),
        draw_bar(parts, whole, limit),
        draw_legend(parts, memory.device or whole, "Bytes of a device"),
        tag("p", gradients, class_="remark"),
    )


def _leaves(plan: Plan) -> Markup:
    columns = {"Array": False, "Shape": False, "Type": False, "Split by": False}
    columns |= dict.fromkeys(("Parameter", "Gradient", "Optimizer", "In all"), True)
    rows = []
    for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.total):
        shape = " x ".join(f"{size:,}" for size in leaf.shape) or "scalar"
        sizes = (leaf.bytes, leaf.gradient, leaf.optimizer, leaf.total)
        cells = [
            tag("th", tag("code", leaf.path), scope="row"),
            tag("td", shape, data_value=math.prod(leaf.shape)),
            tag("td", leaf.dtype),
            tag("td", tag("code", leaf.spec)),
            *[number_cell(format_bytes(size), size) for size in sizes],
        ]
        rows.append(tag("tr", *cells))
    said = "One device's part of each array, of its gradient and of its optimizer state."
    table = sortable_table("leaves", "Arrays of the model", columns, rows, "arrays")
    return card("arrays", "Arrays of the model", tag("p", said), table)


def _traffic(plan: Plan) -> Markup:
    parts = [
        Part(_kind_style(kind), f"{axes} {kind}", sent, format_bytes(sent))
        for axes, kinds in plan.traffic.items()
        for kind, sent in kinds.items()
    ]
    parts.sort(key=lambda part: -part.size)
    largest = max((part.size for part in parts), default=0)
    bars = draw_bars(parts, largest, "Bytes sent by axes and kind")
    said = tag("p", "What each device sends in a step.")
    return card("traffic", "Traffic", said, bars)


def _kind_style(kind: str) -> str:
    """The class that colours a kind of collective."""
    known = ("all-gather", "reduce-scatter", "all-reduce")
    return kind if kind in known else "other-kind"


def _loops(spans: Sequence[PlannedSpan]) -> Markup:
    """How long each loop takes, and all that is in none."""
    device = [span for span in spans if span.kind in ("compute", "memory", "waiting")]
    lengths = [(span.end - span.start) * span.times for span in device]
    whole, rest, rows = sum(lengths), sum(lengths), list[Markup]()

    def add(name: str, each: str, seconds: int | float) -> None:
        cells = (each, format_seconds(seconds), f"{seconds / whole:.0%}" if whole else "")
        cells = [tag("td", text) for text in cells]
        rows.append(tag("tr", tag("th", name, scope="row"), *cells))

    end = 0.0
    for number, loop in enumerate((x for x in spans if x.kind == "loop"), 1):
        inside = sum(
            length
            for span, length in zip(device, lengths, strict=True)
            if loop.start <= span.start and span.end <= loop.end
        )
        if loop.start >= end:  # Not in another loop.
            rest, end = rest - inside, loop.end
        add(f"loop {number}", f"{loop.times:,} times", inside)
    add("outside loops", "once", rest)
    columns = ("Part", "Runs", "In all", "Share")
    return plain_table("Loops of the step", columns, rows)


def _collectives(plan: Plan) -> Markup:
    columns = {"Axes": False, "Kind": False, "Times": True, "Each": True}
    columns |= {"In all": True, "Hidden": True, "In a loop": False, "Cause": False}
    rows = []
    for each in sorted(plan.collectives, key=lambda each: -each.sent_in_all):
        hidden = "" if each.hidden is None else f"{each.hidden:.0%}"
        cells = [
            tag("td", join_axes(each.axes)),
            tag("td", tag("span", class_=f"swatch {_kind_style(each.kind)}"), each.kind),
            number_cell("?" if each.times is None else f"{each.times:,}", each.times),
            number_cell(format_bytes(each.sent), each.sent),
            number_cell(format_bytes(each.sent_in_all), each.sent_in_all),
            number_cell(hidden, each.hidden),
            tag("td", "yes" if each.in_loop else ""),
            tag("td", *_cause(each.leaves, each.line), class_="cause"),
        ]
        rows.append(tag("tr", *cells))
    said = "What each device sends: each time, and in all of a step."
    table = sortable_table("collectives", "Collectives", columns, rows, "collectives")
    return card("collectives", "Collectives", tag("p", said), table)


def _cause(leaves: Sequence[str], line: str | None) -> Iterator[Markup]:
    paths = [tag("code", path) for path in leaves]
    yield from paths[:3]
    if paths[3:]:
        yield tag("details", tag("summary", f"{len(paths) - 3} more"), *paths[3:])
    if line:
        yield tag("span", line, class_="line")


def _findings(plan: Plan) -> Markup:
    if not plan.findings:
        return Markup("")
    items = [tag("li", tag("strong", each.kind), f": {each}") for each in plan.findings]
    said = "What is most likely not meant, as eqxshard.lint finds it."
    return card("findings", "Findings", tag("p", said), tag("ul", *items))


def _notes(plan: Plan) -> Markup:
    notes = [tag("li", f"{note}.") for note in plan.notes]
    return card("notes", "Notes", tag("ul", *notes)) if notes else Markup("")


def _settings(plan: Plan) -> Markup:
    flops = {
        f"{dtype} arithmetic": f"{n / 1e12:,.4g} TFLOP" for dtype, n in plan.flops.items()
    }
    found = dict(plan.settings) | flops
    found["compiled in"] = format_seconds(plan.compile_seconds)
    return card("settings", "Settings", settings_list(found))
