"""The timeline of a step: the compiler's own schedule, with the seconds of each part.

Kernels run one after the other. Collectives run beside them, from their `-start` to their
`-done`, where the devices wait for the rest of them. The links inside hosts carry one
collective at a time, and so does the network between hosts; a collective that uses both
occupies both. At the peaks of the target this is the least time of a step. `_efficiency`
has the assumptions on how much of the peaks is reached, `_links` the time of a collective.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..compiled._communication import Collective, Operation, join_axes
from ..compiled._hlo import Instruction, Module
from ._costs import FREE, Costs
from ._efficiency import AT_PEAKS, Efficiency, Work, idle
from ._links import LINKS, seconds_by_link
from ._targets import Target, cores_of


@dataclass(frozen=True)
class PlannedSpan:
    """A part of a planned step's timeline.

    Of a loop, the timeline has the first iteration. A step takes `(end - start) * times`,
    summed over the kinds `compute`, `memory` and `waiting`.

    - `kind`: `compute` or `memory`, if instructions of the device wait for these;
        `waiting`, if the device waits for a collective; `collective`, while a collective is
        under way; `loop`, for all iterations of a loop.
    - `start`, `end`: seconds from the start of the step.
    - `times`: how often a step does it; for a loop, the number of iterations.
    - `collective`: the number of the collective in `plan.collectives`, if there is one.
    """

    kind: Literal["compute", "memory", "waiting", "collective", "loop"]
    start: float
    end: float
    times: int = 1
    collective: int | None = None


class Timeline:
    """The timeline of a compiled step on a target.

    - `spans`: its [`eqxshard.planning.PlannedSpan`][]s, sorted by their start.

    **Arguments:**

    - `module`: the compiled step.
    - `operations`: its collectives.
    - `target`: the devices.
    - `efficiency`: how much of their peaks they reach; by default all, for the least time.
    - `work`: the function from an instruction to its work, by default `read_work`.
    """

    def __init__(
        self,
        module: Module,
        operations: Sequence[Operation],
        target: Target,
        efficiency: Efficiency = AT_PEAKS,
        work: Callable[[Instruction], Work] | None = None,
    ):
        self._module = module
        self._target = target
        self._efficiency = efficiency
        self._work = work or partial(read_work, Costs(module), target)
        #: By computation and name: the number of a collective, and its seconds by link.
        self._operations = {
            (x.start.computation, x.start.name): (
                n,
                seconds_by_link(x, target, efficiency) or {},
            )
            for n, x in enumerate(operations)
        }
        spans, _ = self._run(module.entry)
        self.spans = tuple(sorted(spans, key=lambda span: (span.start, -span.end)))
        self._totals = defaultdict[tuple[str, int | None], float](float)
        for span in self.spans:
            for number in {None, span.collective}:
                self._totals[span.kind, number] += (span.end - span.start) * span.times

    @property
    def length(self) -> float:
        """The seconds of a step."""
        return sum(map(self.seconds, ("compute", "memory", "waiting")))

    def seconds(self, kind: str, collective: int | None = None) -> float:
        """The seconds in a step of all spans of a kind, or of those of one collective."""
        return self._totals.get((kind, collective), 0.0)

    def _run(self, computation: str) -> tuple[list[PlannedSpan], float]:
        """The spans of a computation that starts at 0, and how long it takes."""
        spans, now = list[PlannedSpan](), 0.0
        # When each kind of link is free, and when each collective under way ends.
        free: dict[str, float] = dict.fromkeys(LINKS, 0.0)
        under_way = dict[str, float]()
        for instruction in self._module.computations.get(computation, ()):
            opcode, key = instruction.opcode, (computation, instruction.name)
            if opcode.endswith("-done") and instruction.operands:
                start = instruction.operands[0]
                number, _ = self._operations.get((computation, start), (None, {}))
                end = max(now, under_way.pop(start, now))
                spans.append(PlannedSpan("waiting", now, end, collective=number))
                now = end
            elif key in self._operations:
                number, seconds = self._operations[key]
                start = max([now, *(free[link] for link in seconds)])
                end = start + max(seconds.values(), default=0.0)
                free |= dict.fromkeys(seconds, end)
                spans.append(PlannedSpan("collective", start, end, collective=number))
                if opcode.endswith("-start"):
                    under_way[instruction.name] = end
                else:  # Synchronous.
                    spans.append(PlannedSpan("waiting", now, end, collective=number))
                    now = end
            elif opcode in ("while", "call", "conditional"):
                inside, seconds = self._inside(instruction)
                times = self._module.trips(instruction) or 1
                end = now + times * seconds
                if opcode == "while":
                    spans.append(PlannedSpan("loop", now, end, times))
                spans += [
                    replace(x, start=x.start + now, end=x.end + now, times=x.times * times)
                    for x in inside
                ]
                now = end
            elif opcode not in FREE:
                span = self._kernel(instruction, now, max(under_way.values(), default=now))
                spans.append(span)
                now = span.end
        return _joined(spans), now

    def _inside(self, instruction: Instruction) -> tuple[list[PlannedSpan], float]:
        """The spans inside a loop or a call; in a conditional, of the longest branch."""
        called = [name for what, name in instruction.called() if what != "condition"]
        return max(map(self._run, called), key=lambda each: each[1], default=([], 0.0))

    def _kernel(self, instruction: Instruction, now: float, busy: float) -> PlannedSpan:
        """The span of a kernel that starts now, beside collectives that end at `busy`."""
        work = self._work(instruction)
        beside = max(busy - now, 0.0)
        seconds = self._efficiency.seconds(work, self._target.power, beside)
        return PlannedSpan("memory" if work.memory else "compute", now, now + seconds)


def _joined(spans: Sequence[PlannedSpan]) -> list[PlannedSpan]:
    """Spans without empty ones; one that continues the span before is joined with it."""
    joined = list[PlannedSpan]()
    for span in spans:
        last = joined[-1] if joined else None
        if last == replace(span, start=last.start if last else 0.0, end=span.start):
            span = replace(span, start=joined.pop().start)
        if span.end > span.start:
            joined.append(span)
    return joined


def compute_seconds(flops: Mapping[str, int | float], target: Target) -> float:
    """The least seconds of matrix products, from their operations by dtype."""
    slowest = min(target.flops.values(), default=float("inf"))
    return sum((n / target.flops.get(dtype, slowest) for dtype, n in flops.items()), 0.0)


def read_work(costs: Costs, target: Target, instruction: Instruction) -> Work:
    """The work of an instruction on a device of a target, by the costs of its module."""
    memory = costs.bytes(instruction) / (target.bandwidth or float("inf"))
    arithmetic = shaped = attention = 0.0
    for product in costs.products(instruction):
        seconds = compute_seconds({product.dtype: product.flops}, target)
        arithmetic += seconds
        if product.fused:
            attention += seconds
        else:
            sizes = product.sizes
            shaped += seconds / (1 - (idle(*sizes, cores_of(target)) if sizes else 0.0))
    if memory > arithmetic:
        return Work(memory, memory=memory, kernels=1)
    return Work(arithmetic, shaped, attention, kernels=int(arithmetic > 0))


def make_trace(
    spans: Sequence[PlannedSpan], collectives: Sequence[Collective]
) -> dict[str, Any]:
    """Spans in the Trace Event Format: one row for the device, one for each axis' links.

    **Arguments:**

    - `spans`: those of a plan, in their order.
    - `collectives`: those of the same plan, which the spans name by number.
    """
    rows, events = dict[str, int](), list[dict[str, Any]]()
    for span in spans:
        row, name, more = "device", span.kind, dict[str, Any](times=span.times)
        if span.kind == "loop":
            row, name = "loops", f"{span.times:,} iterations, with the first in detail"
        if span.collective is not None:
            found = collectives[span.collective]
            links = f"{join_axes(found.axes)} links"
            name = f"wait for {links}"
            if span.kind == "collective":
                row, name = links, found.kind
            more |= {"kind": found.kind, "bytes sent": found.sent}
            more |= {"line": found.line, "arrays": ", ".join(found.leaves)}
        event = {"ph": "X", "name": name, "pid": 0, "args": more}
        event |= {"tid": rows.setdefault(row, len(rows)), "ts": 1e6 * span.start}
        events.append(event | {"dur": 1e6 * (span.end - span.start)})
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        for name, row in rows.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
