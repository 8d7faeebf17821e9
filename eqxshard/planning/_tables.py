"""A plan as tables of text; its page has the same rows."""

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
    yield (
        f"{plan.devices} x {plan.target.kind} ({format_mesh(plan.mesh)}), compiled in "
        f"{plan.compile_seconds:.0f} s by the backend {plan.backend}"
    )
    yield render(_memory_table(plan))
    if plan.collectives:
        rows = [collective_row(each, most=3) for each in by_bytes(plan.collectives)]
        yield _print_rows("collectives", COLLECTIVES, rows)
    if plan.leaves:
        yield _print_rows("arrays", ARRAYS, [*map(leaf_row, by_total(plan.leaves))])
    yield "\n".join(_summary(plan))
    if plan.findings:
        yield f"Most likely not meant:\n{plan.findings}"


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    gradients = format_bytes(memory.gradients)
    rows = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "other state": memory.other_state,
        "batch": memory.batch,
        f"temporaries (gradients: {gradients})": memory.temporaries,
        "peak": memory.peak,
    }
    if memory.left is not None:
        rows[f"left of {format_bytes(memory.device or 0)}"] = memory.left
    if memory.host:
        rows["of the host's memory"] = memory.host
    table = Table("memory of a device")
    table.add_column(justify="right")
    for name, size in rows.items():
        table.add_row(name, format_bytes(size))
    return table


def _summary(plan: Plan) -> Iterator[str]:
    flops = ", ".join(f"{format_flops(n)} {k}" for k, n in plan.flops.items())
    yield f"Arithmetic of a device: {flops or 'no matrix products'}"
    if plan.time is not None and plan.time.step:
        parts = ", ".join(
            f"{name} {format_seconds(seconds)}"
            for name, seconds in plan.time.parts.items()
            if seconds
        )
        yield (
            f"A step takes {how_sure(plan.target)} {format_seconds(plan.time.step)}, "
            f"bound by {plan.time.bound}: {parts}"
        )
        speed = f"{plan.examples_per_second:,.4g} examples/s in all"
        if plan.tokens_per_second is not None:
            each = plan.tokens_per_second / plan.devices
            speed = f"{plan.tokens_per_second:,.0f} tokens/s in all, {each:,.0f} each"
        used = "" if plan.mfu is None else f"; {plan.mfu:.0%} MFU at that speed"
        yield f"{speed}{used}"
    if plan.fits is False:
        yield _lack(plan)
    for note in plan.notes:
        yield f"Note: {note}."


def _lack(plan: Plan) -> str:
    memory = plan.memory
    said = f"It does not fit: each device lacks {format_bytes(-(memory.left or 0))}"
    if memory.peak - memory.temporaries > (memory.device or 0):
        return f"{said}, as its state is too large; split it over more devices."
    return (
        f"{said}, as temporaries take {format_bytes(memory.temporaries)}; compute in "
        "bfloat16, compute layers again (remat), or accumulate over more microbatches."
    )


def by_bytes(collectives: Sequence[Collective]) -> list[Collective]:
    """Collectives, those first that send the most in a step."""
    return sorted(collectives, key=lambda each: -each.sent_in_all)


def by_total(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Arrays, those first that take the most of a device."""
    return sorted(leaves, key=lambda leaf: -leaf.total)


def collective_row(each: Collective, most: int | None = None) -> list[Cell]:
    """The cells of `COLLECTIVES`, naming at most so many arrays."""
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


def leaf_row(leaf: Leaf) -> list[Cell]:
    """The cells of `ARRAYS`."""
    sizes = (leaf.bytes_per_device, leaf.gradient, leaf.optimizer, leaf.total)
    spec = format_spec(leaf.spec)
    return [leaf.path, leaf.dtype, format_shape(leaf.shape), spec, *map(_bytes, sizes)]


def _bytes(size: int) -> Number:
    return Number(format_bytes(size), size)


def _print_rows(what: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The first rows of a table, as text."""
    some = f"{_PRINTED} largest of " if len(rows) > _PRINTED else ""
    table = Table(title=f"{some}{len(rows)} {what}", title_justify="left")
    table.title_style = "none"
    for column, cell in zip(columns, rows[0], strict=True):
        justify = "right" if isinstance(cell, Number) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows[:_PRINTED]:
        texts = (cell.text if isinstance(cell, Number) else cell for cell in row)
        table.add_row(*map(Text, texts))
    return render(table)
