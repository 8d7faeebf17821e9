"""A plan as tables of text, and as one page of HTML, which loads nothing from elsewhere."""

from collections.abc import Iterable, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ..compiled._communication import join_axes
from ..inspect._tables import format_shape, render
from ..pages._format import format_flops, format_seconds
from ..pages._kit import (
    Markup,
    Number,
    Part,
    card,
    draw_bar,
    draw_legend,
    draw_table,
    draw_tiles,
    fill_page,
    pair,
    settings_list,
    tag,
)
from ..sharding._spec import format_spec
from ..sharding._text import format_bytes, format_mesh
from ._plan import Plan, PlannedTime

#: The most collectives, and the most arrays, that are printed.
_PRINTED = 15

#: The columns of the tables of collectives and of arrays.
COLLECTIVES = ("axes", "kind", "times", "each", "in all", "hidden", "in a loop", "cause")
ARRAYS = ("array", "type", "shape", "spec", "bytes", "gradient", "optimizer", "in all")


def print_plan(plan: Plan) -> Iterator[str]:
    """The parts of a printed plan."""
    memory = plan.memory.parts
    if plan.memory.gradients is not None:
        gradients = format_bytes(plan.memory.gradients)
        memory[f"temporaries (gradients: {gradients})"] = memory.pop("temporaries")
    memory["peak"] = plan.memory.peak
    if plan.memory.left is not None:
        memory[f"left of {format_bytes(plan.memory.device or 0)}"] = plan.memory.left
    if plan.memory.host:
        memory["of the host's memory"] = plan.memory.host
    rows = [[name, _bytes(size)] for name, size in memory.items()]
    yield (
        f"{plan.devices} x {plan.target.kind} ({format_mesh(plan.mesh)}), compiled in "
        f"{plan.compile_seconds:.0f} s by the backend {plan.backend}"
    )
    yield _print_rows(("memory of a device", ""), rows)
    for what, columns, rows in (
        ("collectives", COLLECTIVES, collective_rows(plan, most=3)),
        ("arrays", array_columns(plan), array_rows(plan)),
    ):
        some = f"{_PRINTED} largest of " if len(rows) > _PRINTED else ""
        if rows:
            title = f"{some}{len(rows)} {what}"
            yield _print_rows(columns, rows[:_PRINTED], title)
    yield "\n".join(_summary(plan))
    if plan.findings:
        yield f"Most likely not meant:\n{plan.findings}"


def _summary(plan: Plan) -> Iterator[str]:
    flops = ", ".join(f"{format_flops(n)} {k}" for k, n in plan.flops.items())
    if again := flops_again(plan):
        flops += f"; {format_flops(again)} of it computed again"
    yield f"Arithmetic of a device: {flops or 'no matrix products'}"
    if plan.time is not None and plan.time.step:
        about = plan.time.about
        yield f"{say_time(plan)}: {_say_parts(plan.time)}"
        if about is not None:
            yield f"Of about {format_seconds(about.step)}: {_say_parts(about)}"
        for how, time in (("At most", plan.time), ("About", about)):
            if time is not None and plan.examples is not None:
                speed, more = say_speed(plan, time)
                used = "".join(f"; {x:.0%} {name}" for name, x in use_at(plan, time))
                yield f"{how} {speed} in all, {more}{used}"
    if plan.fits:
        device = format_bytes(plan.memory.device or 0)
        yield f"It fits: {format_bytes(plan.memory.peak)} of {device}"
    elif plan.fits is False:
        yield (
            f"{say_lack(plan)}; split the state over more devices, or take less for "
            "temporaries: compute in bfloat16, compute layers again (remat), or accumulate "
            "over more microbatches."
        )
    for note in plan.notes:
        yield f"Note: {note}."


def say_time(plan: Plan) -> str:
    """A clause on how long a step takes, and what bounds it."""
    assert plan.time is not None
    said = f"at least {format_seconds(plan.time.step)}"
    if plan.time.about is not None:
        said += f", about {format_seconds(plan.time.about.step)}"
    return f"A step takes {said}, bound by {plan.time.bound}"


def _say_parts(time: PlannedTime) -> str:
    parts = time.parts.items()
    return ", ".join(f"{name} {format_seconds(x)}" for name, x in parts if x)


def say_speed(plan: Plan, time: PlannedTime) -> tuple[str, str]:
    """The examples per second of a step that takes this time, and the size of a batch."""
    assert plan.examples is not None
    speed = plan.examples / time.step
    # Four digits, without an exponent.
    shown = f"{float(f'{speed:.4g}'):,.0f}" if speed >= 1000 else f"{speed:.4g}"
    return f"{shown} examples/s", f"{plan.examples:,} at once"


def use_at(plan: Plan, time: PlannedTime) -> Iterator[tuple[str, float]]:
    """The MFU and the HFU of a step that takes this time, with their names."""
    if plan.mfu is not None and plan.hfu is not None and plan.time is not None:
        faster = plan.time.step / time.step
        yield "MFU", plan.mfu * faster
        yield "HFU", plan.hfu * faster


def flops_again(plan: Plan) -> float:
    """The operations of a device that a step does again to save memory."""
    return float(sum(plan.flops.values()) - sum(plan.model_flops.values()))


def say_lack(plan: Plan) -> str:
    """A clause on how much memory each device lacks."""
    return f"It does not fit: each device lacks {format_bytes(-(plan.memory.left or 0))}"


def collective_rows(plan: Plan, most: int | None = None) -> list[list[str]]:
    """The rows of the table of collectives, with at most `most` names of arrays in each."""
    rows = list[list[str]]()
    for each in sorted(plan.collectives, key=lambda each: -each.sent_in_all):
        names, rest = [*each.leaves[:most]], len(each.leaves[most:]) if most else 0
        names += [f"{rest} more"] if rest else []
        rows.append(
            [
                join_axes(each.axes),
                each.kind,
                Number("?" if each.times is None else f"{each.times:,}"),
                _bytes(each.sent),
                _bytes(each.sent_in_all),
                Number("" if each.hidden is None else f"{each.hidden:.0%}"),
                "yes" if each.in_loop else "",
                " at ".join(filter(None, [", ".join(names), each.line])),
            ]
        )
    return rows


def array_columns(plan: Plan) -> Sequence[str]:
    """The columns of the table of arrays; for a function, gradients are not known."""
    return ARRAYS if plan.memory.gradients is not None else ARRAYS[:5]


def array_rows(plan: Plan) -> list[list[str]]:
    """The rows of the table of arrays, the largest first."""
    rows, columns = list[list[str]](), len(array_columns(plan))
    for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.total):
        sizes = (leaf.bytes_per_device, leaf.gradient, leaf.optimizer, leaf.total)
        names = [leaf.path, leaf.dtype, format_shape(leaf.shape), format_spec(leaf.spec)]
        rows.append([*names, *map(_bytes, sizes)][:columns])
    return rows


def _bytes(size: int) -> Number:
    return Number(format_bytes(size))


def _print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None
) -> str:
    table = Table(title=title, title_justify="left", title_style="none")
    for column, cell in zip(columns, rows[0], strict=True):
        justify = "right" if isinstance(cell, Number) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return render(table)


def render_page(plan: Plan) -> str:
    """The page, as text."""
    mesh = format_mesh(plan.mesh)
    devices = f"{plan.devices:,} x {plan.target.kind}"
    headline = f"A step needs {format_bytes(plan.memory.peak)} of each device"
    if plan.fits is False:
        headline = say_lack(plan)
    elif plan.time is not None and plan.time.step:
        headline = say_time(plan)
    return fill_page(
        title=f"{devices}: {mesh}",
        about=f"{devices}, {mesh}, compiled by the backend {plan.backend}",
        headline=headline,
        tiles=draw_tiles(_tiles(plan)),
        cards=(
            _listed("findings", "Most likely not meant", map(str, plan.findings)),
            pair(_time(plan), _memory(plan)),
            _settings(plan),
            _table(
                "collectives",
                "Collectives: what each device sends, each time and in all of a step",
                COLLECTIVES,
                collective_rows(plan),
            ),
            _table(
                "arrays",
                "One device's part of each array, its gradient and its optimizer state",
                array_columns(plan),
                array_rows(plan),
            ),
            _listed("notes", "Notes", plan.notes),
        ),
    )


def _tiles(plan: Plan) -> dict[str, tuple[str, str]]:
    tiles = dict[str, tuple[str, str]]()
    time = plan.time and (plan.time.about or plan.time)
    how = "about" if plan.time is not time else "at least"
    if time is not None and time.step:
        tiles["Step"] = format_seconds(time.step), f"{how}; bound by {time.bound}"
        if plan.examples is not None:
            tiles["Speed"] = say_speed(plan, time)
    memory = plan.memory
    of = "" if memory.device is None else f"of {format_bytes(memory.device)}: "
    fits = {None: "", True: "it fits", False: "it does not fit"}[plan.fits]
    tiles["Memory of a device"] = format_bytes(memory.peak), f"{of}{fits}"
    if time is not None and (used := dict(use_at(plan, time))):
        tiles["MFU"] = (
            f"{used['MFU']:.0%}",
            f"of the peak, at that speed; HFU: {used['HFU']:.0%}",
        )
    return tiles


def _time(plan: Plan) -> Markup:
    if plan.time is None or not plan.time.step:
        return Markup("")
    least, about = plan.time, plan.time.about
    parts = [
        # The parts of links are the times that the device waits for them.
        Part("waiting" if name.endswith(" links") else name, name, seconds, text)
        for name, seconds in (about or least).parts.items()
        if (text := format_seconds(seconds)) and seconds
    ]
    said = "The least time, by the compiler's schedule. Real steps take longer."
    if about is not None:
        said = (
            "The time to expect, by the compiler's schedule at the efficiency of the "
            f"target. The least time is {format_seconds(least.step)}."
        )
    if least.waiting is None:
        said = (
            "The least time, without a schedule of the target: compute may hide all links, "
            "or the reverse."
        )
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
    said = ""
    if memory.gradients is not None:
        said = (
            f"{format_bytes(memory.gradients)} of the temporaries are gradients, if all "
            "exist at once."
        )
    if memory.host:
        said += f" Offloaded arrays take {format_bytes(memory.host)} of the host."
    limit = memory.device if plan.fits is False else None
    return _bar("memory", "Memory of a device", said, parts, limit)


def _bar(
    name: str, title: str, said: str, parts: Sequence[Part], limit: int | None = None
) -> Markup:
    """A card with a bar and a table of its parts."""
    whole = sum(part.size for part in parts)
    bar, legend = draw_bar(parts, whole, limit), draw_legend(parts, whole, title)
    return card(name, title, tag("p", said), bar, legend)


def _table(name: str, title: str, columns: Iterable[str], rows: list[list[str]]) -> Markup:
    """A card with a table; nothing if there are no rows."""
    if not rows:
        return Markup("")
    heads = [column.capitalize() for column in columns]
    return card(name, title, draw_table(name, heads, rows))


def _listed(name: str, title: str, texts: Iterable[str]) -> Markup:
    items = [tag("li", text) for text in texts]
    return card(name, title, tag("ul", *items)) if items else Markup("")


def _settings(plan: Plan) -> Markup:
    flops = {f"{dtype} arithmetic": format_flops(n) for dtype, n in plan.flops.items()}
    if again := flops_again(plan):
        flops["computed again"] = format_flops(again)
    seconds = {"compiled in": format_seconds(plan.compile_seconds)}
    return card(
        "settings", "Settings", settings_list({**plan.settings, **flops, **seconds})
    )
