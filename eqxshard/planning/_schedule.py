"""How long a step takes at least: a roofline over the compiler's own schedule.

Instructions run one after the other, each as long as its arithmetic or its memory takes,
whichever is longer. Collectives run beside them, one at a time, from their `-start` to
their `-done`, where the devices wait for what is left.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import numpy as np

from ..compiled._communication import Operation
from ..compiled._hlo import Instruction, Module
from ._costs import FREE, Costs
from ._targets import Target
from ._timeline import PlannedSpan, Recorder, Timeline


class _Seconds(defaultdict[tuple[str, str], float]):
    """Seconds of collectives, by their computations and names; 0 for others."""

    def __init__(self):
        super().__init__(float)


@dataclasses.dataclass
class Elapsed:
    """The seconds of a computation, and what they are spent on.

    - `compute`, `memory`: of instructions whose arithmetic, or whose memory, takes longer.
    - `waiting`: for each collective, by computation and name, the seconds that the devices
        wait for it.
    - `sending`: for each collective, the seconds that it takes.
    - `timeline`: what happens when.
    """

    compute: float = 0.0
    memory: float = 0.0
    waiting: _Seconds = dataclasses.field(default_factory=_Seconds)
    sending: _Seconds = dataclasses.field(default_factory=_Seconds)
    timeline: Timeline = Timeline()

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.compute + self.memory + sum(self.waiting.values())

    def add(self, other: "Elapsed", times: int = 1) -> None:
        """Add a computation that runs several times."""
        self.compute += times * other.compute
        self.memory += times * other.memory
        for key, value in other.waiting.items():
            self.waiting[key] += times * value
        for key, value in other.sending.items():
            self.sending[key] += times * value


class Schedule:
    """The schedule of a module on a target."""

    def __init__(self, module: Module, operations: list[Operation], target: Target):
        self._module = module
        self._costs = Costs(module)
        self._target = target
        self._seconds = {
            key_of(operation): link_seconds(operation, target) or 0.0
            for operation in operations
        }
        self._numbers = {key: number for number, key in enumerate(self._seconds)}
        self._known: dict[str, Elapsed] = {}

    def elapsed(self, computation: str) -> Elapsed:
        """How long a computation takes."""
        if computation not in self._known:
            self._known[computation] = self._run(computation)
        return self._known[computation]

    def _run(self, computation: str) -> Elapsed:
        total, recorder = Elapsed(), Recorder()
        # When the links are free, and when each collective under way ends.
        free, under_way = 0.0, dict[str, float]()
        for instruction in self._module.computations.get(computation, ()):
            key, now = (computation, instruction.name), total.seconds
            if instruction.opcode.endswith("-done") and instruction.operands:
                start = computation, instruction.operands[0]
                end = under_way.pop(instruction.operands[0], 0.0)
                if end > now:
                    total.waiting[start] += end - now
                    number = self._numbers.get(start)
                    recorder.add(PlannedSpan("waiting", now, end, collective=number))
            elif key in self._seconds:
                seconds, number = self._seconds[key], self._numbers[key]
                total.sending[key] += seconds
                start = max(free, now)
                free = start + seconds
                recorder.add(PlannedSpan("collective", start, free, collective=number))
                if instruction.opcode.endswith("-start"):
                    under_way[instruction.name] = free
                else:  # Synchronous.
                    total.waiting[key] += free - now
                    recorder.add(PlannedSpan("waiting", now, free, collective=number))
            elif instruction.opcode in ("while", "call", "conditional"):
                inside, times = self._inside(instruction), self._module.trips(instruction)
                total.add(inside, times or 1)
                free = max(free, total.seconds)
                kind = "loop" if instruction.opcode == "while" else "compute"
                span = PlannedSpan(kind, now, total.seconds, times or 1)
                recorder.add_called(span, inside.timeline)
            elif instruction.opcode not in FREE:
                kind = self._add_instruction(total, instruction)
                recorder.add(PlannedSpan(kind, now, total.seconds))
        total.timeline = recorder.finish(total.seconds)
        return total

    def _inside(self, instruction: Instruction) -> Elapsed:
        """What an instruction calls: of the branches of a condition, the longest."""
        called = [name for what, name in instruction.called() if what != "condition"]
        if not called:
            return Elapsed()
        return max(map(self.elapsed, called), key=lambda each: each.seconds)

    def _add_instruction(
        self, total: Elapsed, instruction: Instruction
    ) -> Literal["compute", "memory"]:
        compute = compute_seconds(self._costs.flops(instruction), self._target)
        bandwidth = (self._target.bandwidth or float("inf")) * self._target.efficiency
        memory = self._costs.bytes(instruction) / bandwidth
        if compute >= memory:
            total.compute += compute
            return "compute"
        total.memory += memory
        return "memory"


def key_of(operation: Operation) -> tuple[str, str]:
    """The computation and the name of the instruction that starts a collective."""
    return operation.start.computation, operation.start.name


def compute_seconds(flops: Mapping[str, int | float], target: Target) -> float:
    """The seconds that matrix products take."""
    slowest = min(target.flops.values(), default=float("inf"))
    at_peak = sum(n / target.flops.get(dtype, slowest) for dtype, n in flops.items())
    return at_peak / target.efficiency


def link_seconds(operation: Operation, target: Target) -> float | None:
    """The seconds of one run of a collective, if nothing else uses the links.

    All devices of a host send at once, each through its own port. Between hosts, a
    collective over groups of several devices of each host sends every part over the
    network once: the slower of the two, links or network, decides.

    **Returns:**

    The seconds; `None` if the links that it goes over, or the groups, are not known.
    """
    groups = operation.groups
    if groups is None or target.link is None:
        return None
    link = target.link * target.efficiency
    hosts = groups // target.per_host
    crossing = bool((hosts != hosts[:, :1]).any())
    if not crossing:
        return operation.sent / link
    if target.network is None:
        return None
    network = target.network * target.efficiency
    devices = groups.shape[1]
    if operation.kind == "collective-permute":
        return operation.sent / network
    across = len(np.unique(hosts[0]))
    each = devices / across
    if "all-to-all" in operation.kind:
        beyond = operation.bytes * (devices - each) / devices
        return max(operation.sent / link, beyond / network)
    # The whole that is gathered or reduced, of which each host sends all but its part.
    whole = operation.sent * devices / max(devices - 1, 1)
    beyond = whole * (across - 1) / across / each
    return max(operation.sent / link, beyond / network)
