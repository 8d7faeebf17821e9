"""The time line of a plan as a trace, which Perfetto and Chrome open."""

from collections.abc import Sequence
from typing import Any

from ..compiled._collective import Collective, join_axes
from ._timeline import PlannedSpan


def make_trace(
    spans: Sequence[PlannedSpan], collectives: Sequence[Collective]
) -> dict[str, Any]:
    """Spans in the Trace Event Format: one row for the device, one for each axis' links.

    **Arguments:**

    - `spans`: of a plan, in their order.
    - `collectives`: of that plan, which the spans name by number.
    """
    rows, events, loops = dict[str, int](), list[dict[str, Any]](), 0
    for span in spans:
        found = None if span.collective is None else collectives[span.collective]
        row, name = "device", span.kind
        more: dict[str, Any] = {"times": span.times}
        if span.kind == "loop":
            loops += 1
            row, name = "loops", f"loop {loops}: one of {span.times:,} iterations"
        if found is not None:
            links = f"{join_axes(found.axes)} links"
            row, name = ("device", f"wait for {links}")
            if span.kind == "collective":
                row, name = (links, found.kind)
            more |= {"kind": found.kind, "bytes sent": found.sent}
            more |= {"line": found.line, "arrays": ", ".join(found.leaves)}
        events.append(
            {
                "ph": "X",  # A complete event.
                "name": name,
                "pid": 0,
                "tid": rows.setdefault(row, len(rows)),
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
                "args": more,
            }
        )
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
