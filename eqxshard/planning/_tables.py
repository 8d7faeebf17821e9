"""A plan as tables of text, and what its page says in the same words."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ..compiled._collective import Collective, join_axes
from ..inspect._explanation import Leaf
from ..inspect._tables import format_shape, render
from ..pages._format import format_bytes, format_flops, format_seconds
from ..pages._kit import Cell, Number
from ..sharding._spec import format_spec
from ..sharding._text import format_mesh
from ._plan import Plan
from ._targets import how_sure

#: How many collectives, and how many arrays, are printed.
_PRINTED = 15

#: The columns of collectives and of arrays.
COLLECTIVES = ("axes", "kind", "times", "each", "in all", "hidden", "in a loop", "cause")
ARRAYS = ("array", "type", "shape", "spec", "bytes", "gradient", "optimizer", "in all")


def print_plan(plan: Plan) -> Iterator[str]:
    """The parts of a plan as text."""
    memory = plan.memory.parts
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
        ("arrays", ARRAYS, array_rows(plan)),
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
    yield f"Arithmetic of a device: {flops or 'no matrix products'}"
    if plan.time is not None and plan.time.step:
        parts = ", ".join(
            f"{name} {format_seconds(seconds)}"
            for name, seconds in plan.time.parts.items()
            if seconds
        )
        yield f"{say_time(plan)}: {parts}"
        speed, more = say_speed(plan)
        used = "" if plan.mfu is None else f"; {plan.mfu:.0%} MFU at that speed"
        yield f"{speed} in all, {more}{used}"
    if plan.fits is False:
        memory = plan.memory
        remedy = (
            f"as temporaries take {format_bytes(memory.temporaries)}; compute in bfloat16, "
            "compute layers again (remat), or accumulate over more microbatches."
        )
        if memory.peak - memory.temporaries > (memory.device or 0):
            remedy = "as its state is too large; split it over more devices."
        yield f"{say_lack(plan)}, {remedy}"
    for note in plan.notes:
        yield f"Note: {note}."


def say_time(plan: Plan) -> str:
    """How long a step takes, and what for."""
    assert plan.time is not None
    step = format_seconds(plan.time.step)
    return f"A step takes {how_sure(plan.target)} {step}, bound by {plan.time.bound}"


def say_speed(plan: Plan) -> tuple[str, str]:
    """The examples or tokens per second, and a few words more."""
    if plan.tokens_per_second is None:
        return f"{plan.examples_per_second:,.4g} examples/s", f"{plan.examples:,} at once"
    each = plan.tokens_per_second / plan.devices
    return f"{plan.tokens_per_second:,.0f} tokens/s", f"{each:,.0f} on each device"


def say_lack(plan: Plan) -> str:
    """By how much a step does not fit."""
    return f"It does not fit: each device lacks {format_bytes(-(plan.memory.left or 0))}"


def collective_rows(plan: Plan, most: int | None = None) -> list[list[Cell]]:
    """The rows of `COLLECTIVES`, naming at most so many arrays in each."""
    found = sorted(plan.collectives, key=lambda each: -each.sent_in_all)
    return [_collective_row(each, most) for each in found]


def _collective_row(each: Collective, most: int | None) -> list[Cell]:
    names = [*each.leaves[:most]]
    if len(each.leaves) > len(names):
        names.append(f"{len(each.leaves) - len(names)} more")
    return [
        join_axes(each.axes),
        each.kind,
        Number("?" if each.times is None else f"{each.times:,}", each.times),
        _bytes(each.sent),
        _bytes(each.sent_in_all),
        Number("" if each.hidden is None else f"{each.hidden:.0%}", each.hidden),
        "yes" if each.in_loop else "",
        " at ".join(filter(None, [", ".join(names), each.line])),
    ]


def array_rows(plan: Plan) -> list[list[Cell]]:
    """The rows of `ARRAYS`."""
    return [_leaf_row(leaf) for leaf in sorted(plan.leaves, key=lambda leaf: -leaf.total)]


def _leaf_row(leaf: Leaf) -> list[Cell]:
    sizes = (leaf.bytes_per_device, leaf.gradient, leaf.optimizer, leaf.total)
    spec = format_spec(leaf.spec)
    return [leaf.path, leaf.dtype, format_shape(leaf.shape), spec, *map(_bytes, sizes)]


def _bytes(size: int) -> Number:
    return Number(format_bytes(size), size)


def _print_rows(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], title: str | None = None
) -> str:
    table = Table(title=title, title_justify="left", title_style="none")
    for column, cell in zip(columns, rows[0], strict=True):
        justify = "right" if isinstance(cell, Number) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        texts = (cell.text if isinstance(cell, Number) else cell for cell in row)
        table.add_row(*map(Text, texts))
    return render(table)
