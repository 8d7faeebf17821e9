"""A plan in short, as HTML for notebooks."""

from collections.abc import Iterator
from html import escape

from ..pages._format import format_bytes, format_seconds
from ..sharding._html import html_table
from ..sharding._text import format_mesh
from ._plan import Plan
from ._targets import how_sure


def plan_html(plan: Plan) -> str:
    """What a plan says first; its page has all of it."""
    title = f"{plan.devices:,} x {plan.target.kind} ({format_mesh(plan.mesh)})"
    lines = [
        f"<p><strong>Plan</strong> for {escape(title)}</p>",
        html_table([], [*_rows(plan)]),
        '<p><code>save("plan.html")</code> writes a page with all of it.</p>',
    ]
    return '<div class="eqxshard">\n' + "\n".join(lines) + "\n</div>\n"


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    memory = plan.memory
    peak = f"{format_bytes(memory.peak)} at the peak"
    if memory.device is not None:
        verdict = "it fits" if plan.fits else "it does not fit"
        peak += f", of {format_bytes(memory.device)}: {verdict}"
    yield "memory of a device", peak
    parts = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "batch": memory.batch,
        "temporaries": memory.temporaries,
    }
    yield "", ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    if plan.time is not None and plan.time.step:
        seconds = f"{how_sure(plan.target)} {format_seconds(plan.time.step)}"
        yield "a step", f"{seconds}, bound by {plan.time.bound}"
        speed = f"{plan.examples_per_second:,.4g} examples/s"
        if plan.tokens_per_second is not None:
            speed = f"{plan.tokens_per_second:,.0f} tokens/s"
        yield "all devices", speed
    for axes, kinds in plan.traffic.items():
        sent = (f"{kind} {format_bytes(size)}" for kind, size in kinds.items())
        yield f"sent over {axes}", ", ".join(sent)
    for finding in plan.findings:
        yield f"most likely not meant: {finding.kind}", str(finding)
    for note in plan.notes:
        yield "note", f"{note}."
