"""A plan as one page of HTML, which loads nothing from elsewhere."""

from collections.abc import Iterable

from ..pages._format import format_bytes, format_seconds
from ..pages._kit import (
    Cell,
    Markup,
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
    tag,
)
from ..pages._mesh import draw_mesh
from ..sharding._text import format_mesh
from ._plan import Plan
from ._tables import ARRAYS, COLLECTIVES, by_bytes, by_total, collective_row, leaf_row
from ._targets import how_sure


def render_page(plan: Plan) -> str:
    """The page, as text."""
    mesh = format_mesh(plan.mesh)
    devices = f"{plan.devices:,} x {plan.target.kind}"
    return fill_page(
        title=f"{devices}: {mesh}",
        about=f"{devices}, {mesh}, compiled by the backend {plan.backend}",
        headline=_headline(plan),
        tiles=draw_tiles(_tiles(plan)),
        cards=(
            _listed("findings", "Most likely not meant", map(str, plan.findings)),
            pair(_time(plan), _memory(plan)),
            pair(_mesh(plan), _traffic(plan)),
            _collectives(plan),
            _arrays(plan),
            pair(_listed("notes", "Notes", plan.notes), _settings(plan)),
        ),
    )


def _headline(plan: Plan) -> str:
    if plan.fits is False:
        missing = format_bytes(-(plan.memory.left or 0))
        return f"It does not fit: each device lacks {missing}"
    if plan.time is None or not plan.time.step:
        return f"A step needs {format_bytes(plan.memory.peak)} of each device"
    step = format_seconds(plan.time.step).replace(" ", "\u00a0")
    return f"A step takes {how_sure(plan.target)} {step}, bound by {plan.time.bound}"


def _tiles(plan: Plan) -> dict[str, tuple[str, str]]:
    tiles = dict[str, tuple[str, str]]()
    if plan.time is not None and plan.time.step:
        step = format_seconds(plan.time.step), f"bound by {plan.time.bound}"
        tiles[f"Step, {how_sure(plan.target)}"] = step
        if plan.tokens_per_second is None:
            speed = f"{plan.examples_per_second:,.4g}", f"{plan.examples:,} in a batch"
            tiles["Examples per second"] = speed
        else:
            each = plan.tokens_per_second / plan.devices
            speed = f"{plan.tokens_per_second:,.0f}", f"{each:,.0f} on each device"
            tiles["Tokens per second"] = speed
    memory = plan.memory
    of = "" if memory.device is None else f"of {format_bytes(memory.device)}: "
    fits = {None: "", True: "it fits", False: "it does not fit"}[plan.fits]
    tiles["Memory of a device"] = format_bytes(memory.peak), f"{of}{fits}"
    if plan.mfu is not None:
        tiles["MFU"] = f"{plan.mfu:.0%}", "of the peak, at that speed"
    return tiles


def _time(plan: Plan) -> Markup:
    time = plan.time
    if time is None or not time.step:
        return Markup("")
    parts = [
        Part(_style(name), name, seconds, format_seconds(seconds))
        for name, seconds in time.parts.items()
        if seconds
    ]
    said, bar = "A roofline over the compiler's schedule. Real steps take longer.", []
    if time.waiting is not None:
        bar = [draw_bar(parts, time.step)]
    else:
        said = "Without a schedule of the target, all may be hidden behind the longest."
    legend = draw_legend(parts, time.step, "Seconds of a step")
    return card("time", "Time of a step", tag("p", said), *bar, legend)


def _style(name: str) -> str:
    """The class that colours a part of the time."""
    return "waiting" if name.endswith(" links") else name


def _memory(plan: Plan) -> Markup:
    memory = plan.memory
    sizes = {
        "parameters": ("parameters", memory.parameters),
        "optimizer state": ("optimizer", memory.optimizer),
        "other state": ("other", memory.other_state),
        "batch": ("batch", memory.batch),
        "temporaries": ("temporaries", memory.temporaries),
    }
    rest = memory.peak - sum(size for _, size in sizes.values())
    if rest > 0:
        sizes["outputs"] = ("outputs", rest)
    if memory.left is not None and memory.left >= 0:
        sizes["left"] = ("left", memory.left)
    parts = [
        Part(style, name, size, format_bytes(size)) for name, (style, size) in sizes.items()
    ]
    whole = max(memory.device or 0, memory.peak)
    limit = memory.device if plan.fits is False else None
    said = (
        f"{format_bytes(memory.gradients)} of the temporaries are gradients, if all exist "
        "at once."
    )
    if memory.host:
        said += f" What is offloaded takes {format_bytes(memory.host)} of the host."
    return card(
        "memory",
        "Memory of a device",
        tag("p", said),
        draw_bar(parts, whole, limit),
        draw_legend(parts, whole, "Bytes of a device"),
    )


def _mesh(plan: Plan) -> Markup:
    per_host = plan.target.per_host
    hosts = -(-plan.devices // per_host)
    said = f"{plan.devices:,} devices"
    if hosts > 1:
        said += f" on {hosts:,} hosts of {per_host:,}; neighbouring hosts differ in shade"
    picture = scroller("picture of the mesh", draw_mesh(plan.mesh, per_host))
    axes = [(axis, f"{size:,}") for axis, size in plan.mesh.items()]
    table = plain_table("Axes of the mesh", ("Axis", "Size"), axes)
    return card("mesh", "Mesh", tag("p", f"{said}."), picture, table)


def _traffic(plan: Plan) -> Markup:
    parts = [
        Part(kind, f"{axes} {kind}", sent, format_bytes(sent))
        for axes, kinds in plan.traffic.items()
        for kind, sent in kinds.items()
    ]
    parts.sort(key=lambda part: -part.size)
    whole = sum(part.size for part in parts)
    bar, legend = draw_bar(parts, whole), draw_legend(parts, whole, "Bytes sent")
    said = tag("p", "What each device sends in a step, by axes and kind.")
    return card("traffic", "Traffic", said, bar, legend)


def _collectives(plan: Plan) -> Markup:
    rows = [collective_row(each) for each in by_bytes(plan.collectives)]
    said = "What each device sends: each time, and in all of a step."
    return _table("collectives", "Collectives", said, COLLECTIVES, rows)


def _arrays(plan: Plan) -> Markup:
    rows = [leaf_row(leaf) for leaf in by_total(plan.leaves)]
    said = "One device's part of each array, of its gradient and of its optimizer state."
    return _table("arrays", "Arrays of the model", said, ARRAYS, rows)


def _table(
    name: str, title: str, said: str, columns: Iterable[str], rows: list[list[Cell]]
) -> Markup:
    """A card with a table, and its sums; nothing if there are no rows."""
    if not rows:
        return Markup("")
    heads = [column.capitalize() for column in columns]
    table = sortable_table(name, heads, rows, "In all")
    return card(name, title, tag("p", said), table)


def _listed(name: str, title: str, texts: Iterable[str]) -> Markup:
    items = [tag("li", text) for text in texts]
    return card(name, title, tag("ul", *items)) if items else Markup("")


def _settings(plan: Plan) -> Markup:
    flops = {
        f"{dtype} arithmetic": f"{n / 1e12:,.4g} TFLOP" for dtype, n in plan.flops.items()
    }
    found = dict(plan.settings) | flops
    found["compiled in"] = format_seconds(plan.compile_seconds)
    return card("settings", "Settings", settings_list(found))
