"""What the devices do when: a step as spans of time, with one iteration of each loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ..compiled._collective import Collective, join_axes


@dataclass(frozen=True)
class PlannedSpan:
    """A part of a planned step's time line.

    Of each loop it has one iteration, so it is shorter than the step: the step takes
    `(end - start) * times`, summed over the kinds `compute`, `memory` and `waiting`.

    - `kind`: `compute` or `memory`, for which the device's instructions wait; `waiting`,
        for a collective; `collective`, during which it is under way; `loop`, one
        iteration of a loop.
    - `start`, `end`: in seconds.
    - `times`: how often a step does it.
    - `collective`: its number in `plan.collectives`, if it is of one.
    """

    kind: Literal["compute", "memory", "waiting", "collective", "loop"]
    start: float
    end: float
    times: int = 1
    collective: int | None = None


class Timeline(NamedTuple):
    """The spans of a computation, and its length with one iteration of each loop."""

    spans: tuple[PlannedSpan, ...] = ()
    length: float = 0.0


class Recorder:
    """Records what a computation does, in its own time, with all iterations."""

    def __init__(self):
        self._spans: list[PlannedSpan] = []
        self._called: list[tuple[PlannedSpan, Timeline]] = []

    def add(self, span: PlannedSpan) -> None:
        """Add a span; one that goes on with the last one lengthens it."""
        if self._spans and self._spans[-1] == replace(
            span, start=self._spans[-1].start, end=span.start
        ):
            span = replace(self._spans.pop(), end=span.end)
        if span.end > span.start:
            self._spans.append(span)

    def add_called(self, span: PlannedSpan, inside: Timeline) -> None:
        """Add another computation, which runs `span.times` times during a span."""
        self._called.append((span, inside))

    def finish(self, seconds: float) -> Timeline:
        """The time line, of a computation that takes so long."""
        real, shown = [0.0], [0.0]
        spans = []
        for span, inside in self._called:
            start = shown[-1] + span.start - real[-1]
            end = start + inside.length
            real += [span.start, span.end]
            shown += [start, end]
            if span.kind == "loop":
                spans.append(replace(span, start=start, end=end))
            spans += _moved(inside.spans, start, span.times)
        real.append(max(seconds, real[-1]))
        shown.append(shown[-1] + real[-1] - real[-2])
        for span in self._spans:
            # One that outlasts the computation ends with it.
            start, end = np.interp((span.start, span.end), real, shown).tolist()
            spans.append(replace(span, start=start, end=end))
        return Timeline(tuple(sorted(spans, key=lambda x: (x.start, -x.end))), shown[-1])


def _moved(spans: Sequence[PlannedSpan], by: float, times: int) -> Sequence[PlannedSpan]:
    return [
        replace(x, start=x.start + by, end=x.end + by, times=x.times * times) for x in spans
    ]


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
