"""A plan as one page of HTML, which loads nothing from elsewhere."""

from collections.abc import Iterable, Sequence

from ..pages._format import format_bytes, format_seconds
from ..pages._html import Markup, tag
from ..pages._kit import (
    Cell,
    Part,
    card,
    draw_bar,
    draw_legend,
    draw_tiles,
    fill_page,
    pair,
    scroller,
    settings_list,
    sortable_table,
)
from ..pages._mesh import draw_mesh
from ..sharding._text import format_mesh
from ._plan import Plan
from ._tables import (
    ARRAYS,
    COLLECTIVES,
    array_rows,
    collective_rows,
    say_lack,
    say_speed,
    say_time,
)


def render_page(plan: Plan) -> str:
    """The page, as text."""
    mesh = format_mesh(plan.mesh)
    devices = f"{plan.devices:,} x {plan.target.kind}"
    headline = f"A step needs {format_bytes(plan.memory.peak)} of each device"
    if plan.fits is False:
        headline = say_lack(plan)
    elif plan.time is not None and plan.time.step:
        headline = say_time(plan)
    picture = draw_mesh(plan.mesh, plan.target.per_host)
    return fill_page(
        title=f"{devices}: {mesh}",
        about=f"{devices}, {mesh}, compiled by the backend {plan.backend}",
        headline=headline,
        tiles=draw_tiles(_tiles(plan)),
        cards=(
            _listed("findings", "Most likely not meant", map(str, plan.findings)),
            pair(_time(plan), _memory(plan)),
            pair(
                card("mesh", "Mesh", scroller("picture of the mesh", picture)),
                _traffic(plan),
            ),
            _table(
                "collectives",
                "Collectives: what each device sends, each time and in all of a step",
                COLLECTIVES,
                collective_rows(plan),
            ),
            _table(
                "arrays",
                "One device's part of each array, its gradient and its optimizer state",
                ARRAYS,
                array_rows(plan),
            ),
            pair(_listed("notes", "Notes", plan.notes), _settings(plan)),
        ),
    )


def _tiles(plan: Plan) -> dict[str, tuple[str, str]]:
    tiles = dict[str, tuple[str, str]]()
    if plan.time is not None and plan.time.step:
        tiles["Step"] = format_seconds(plan.time.step), f"bound by {plan.time.bound}"
        tiles["Speed"] = say_speed(plan)
    memory = plan.memory
    of = "" if memory.device is None else f"of {format_bytes(memory.device)}: "
    fits = {None: "", True: "it fits", False: "it does not fit"}[plan.fits]
    tiles["Memory of a device"] = format_bytes(memory.peak), f"{of}{fits}"
    if plan.mfu is not None:
        tiles["MFU"] = f"{plan.mfu:.0%}", "of the peak, at that speed"
    return tiles


def _time(plan: Plan) -> Markup:
    if plan.time is None or not plan.time.step:
        return Markup("")
    parts = [
        # Of the links, what is waited for.
        Part("waiting" if name.endswith(" links") else name, name, seconds, text)
        for name, seconds in plan.time.parts.items()
        if (text := format_seconds(seconds)) and seconds
    ]
    said = "A roofline over the compiler's schedule. Real steps take longer."
    if plan.time.waiting is None:
        said = "Without a schedule of the target, all may be hidden behind the longest."
    return _bar("time", "Time of a step", said, parts)


def _memory(plan: Plan) -> Markup:
    memory = plan.memory
    sizes = dict(memory.parts)
    rest = memory.peak - sum(sizes.values())
    sizes |= {"outputs": rest} if rest > 0 else {}
    sizes |= {"left": memory.left} if memory.left and memory.left > 0 else {}
    parts = [
        Part(name.split()[0], name, size, format_bytes(size))
        for name, size in sizes.items()
    ]
    said = (
        f"{format_bytes(memory.gradients)} of the temporaries are gradients, if all exist "
        "at once."
    )
    if memory.host:
        said += f" What is offloaded takes {format_bytes(memory.host)} of the host."
    limit = memory.device if plan.fits is False else None
    return _bar("memory", "Memory of a device", said, parts, limit)


def _traffic(plan: Plan) -> Markup:
    parts = [
        Part(kind, f"{axes} {kind}", sent, format_bytes(sent))
        for axes, kinds in plan.traffic.items()
        for kind, sent in kinds.items()
    ]
    parts.sort(key=lambda part: -part.size)
    said = "What each device sends in a step, by axes and kind."
    return _bar("traffic", "Traffic", said, parts)


def _bar(
    name: str, title: str, said: str, parts: Sequence[Part], limit: int | None = None
) -> Markup:
    """A card with a bar, and its parts as a table."""
    whole = sum(part.size for part in parts)
    bar, legend = draw_bar(parts, whole, limit), draw_legend(parts, whole, title)
    return card(name, title, tag("p", said), bar, legend)


def _table(name: str, title: str, columns: Iterable[str], rows: list[list[Cell]]) -> Markup:
    """A card with a table, ordered by its sums; nothing if there are no rows."""
    if not rows:
        return Markup("")
    heads = [column.capitalize() for column in columns]
    return card(name, title, sortable_table(name, heads, rows, "In all"))


def _listed(name: str, title: str, texts: Iterable[str]) -> Markup:
    items = [tag("li", text) for text in texts]
    return card(name, title, tag("ul", *items)) if items else Markup("")


def _settings(plan: Plan) -> Markup:
    settings = dict(plan.settings)
    for dtype, count in plan.flops.items():
        settings[f"{dtype} arithmetic"] = f"{count / 1e12:,.4g} TFLOP"
    settings["compiled in"] = format_seconds(plan.compile_seconds)
    return card("settings", "Settings", settings_list(settings))
