"""The collectives of a compiled module."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ._hlo import Instruction, Module, Shape
from ._replica_groups import axes_of_groups, parse_groups

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_GROUPS = re.compile(
    r"(replica_groups|source_target_pairs)="
    r"(\{(?:\{[^}]*\},?)*\}|\[[^\s]*?\]<=\[[\d,]*\](?:T\([\d,]*\))?|mesh\[.*?\}(?=,|$))"
)


@dataclass(frozen=True)
class Operation:
    """A collective in a compiled module.

    - `kind`: such as `all-gather`.
    - `shapes`: of its results on each device.
    - `times`: how often one call of the module runs it; `None` if the text does not say.
    - `start`: the instruction that has its operands.
    - `result`: the one that has its result; the same unless it is asynchronous.
    - `groups`: the devices that take part together, one group in each row; `None` if the
        text does not say.
    - `in_loop`: whether it is in the body of a loop.
    """

    kind: str
    shapes: tuple[Shape, ...]
    times: int | None
    start: Instruction
    result: Instruction
    groups: np.ndarray | None
    in_loop: bool

    @property
    def bytes(self) -> int:
        """Of its results on each device."""
        return sum(shape.bytes for shape in self.shapes)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
        """The axes of a mesh that it goes along, if the text says so."""
        return None if self.groups is None else axes_of_groups(self.groups, sizes)

    @functools.cached_property
    def sent(self) -> int:
        """The bytes that each device sends, by the algorithms that send the fewest."""
        devices = 1 if self.groups is None else self.groups.shape[1]
        if self.kind == "collective-permute":
            return self.bytes
        if self.kind == "reduce-scatter":
            return self.bytes * (devices - 1)
        # An all-reduce is a reduce-scatter and an all-gather.
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (devices - 1) // devices


def find_collectives(module: Module, devices: int = 1) -> Iterator[Operation]:
    """The collectives of a compiled module.

    **Arguments:**

    - `module`: the module.
    - `devices`: the number of devices that it is compiled for.
    """
    for instruction in module.instructions():
        # Of an asynchronous pair, the `-done` half counts, whose type is the result's.
        kind = instruction.opcode.removesuffix("-done")
        if kind not in KINDS:
            continue
        start = instruction
        if kind != instruction.opcode and instruction.operands:
            key = instruction.computation, instruction.operands[0]
            start = module.by_name.get(key, instruction)
        groups = _GROUPS.search(start.attributes)
        if fusion := _scatter(module, instruction):
            kind, start, instruction = "reduce-scatter", fusion, fusion
        yield Operation(
            kind=kind,
            shapes=instruction.shapes,
            times=module.times(instruction.computation),
            start=start,
            result=instruction,
            groups=None if groups is None else parse_groups(groups[2], devices),
            in_loop=module.in_loop(instruction.computation),
        )


def _scatter(module: Module, instruction: Instruction) -> Instruction | None:
    """The fusion that an all-reduce is a part of, if TPUs run it as a reduce-scatter."""
    if not instruction.computation.startswith("all-reduce-scatter"):
        return None
    callers = module.callers.get(instruction.computation, ())
    return callers[0] if len(callers) == 1 else None
