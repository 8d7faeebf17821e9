"""The collectives of a compiled module, and the axes of the mesh that they go along."""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._hlo import Instruction, Module, Shape

#: The opcodes of collectives.
COLLECTIVES = (
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

#: The other forms of replica groups, whose numbers are positions in the mesh.
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, ?device_ids=\((.*)\))? ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled function.

    - `kind`: its kind, such as `all-gather`.
    - `shapes`: the shapes of its results on each device, such as `f32[64,64]`; several if
        the compiler combined several operations.
    - `bytes`: the bytes of these results.
    - `sent`: the bytes that each device sends, each time: for an all-gather, an all-to-all
        or a reduce-scatter over `n` devices, `(n - 1) / n` of the whole; for an all-reduce
        twice that; for a collective-permute, the whole.
    - `times`: how often a call runs it: more than once in the body of a loop, `None` if
        the compiled text does not give the loop's trip count.
    - `in_loop`: whether it is in the body of a loop, such as one over layers.
    - `axes`: the axes of the mesh along which devices take part together; `None` if the
        mesh is not known, or the compiled text does not say.

    Those of a plan also have:

    - `line`: the line of your code that causes it, as `model.py:12`.
    - `function`: the function that this line is in, as `MLP.__call__`.
    - `leaves`: the arrays of the model that it gathers, or whose gradients it reduces. The
        compiler does not say the latter, so arrays of the same shape are named together.
    - `hidden`: the part of its time that passes while the device computes, from 0 to 1;
        `None` if it is not known.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    sent: int
    times: int | None
    in_loop: bool
    axes: tuple[str, ...] | None = None
    line: str | None = None
    function: str | None = None
    leaves: tuple[str, ...] = ()
    hidden: float | None = None

    @property
    def sent_in_all(self) -> int:
        """The bytes that each device sends in a call; loops of unknown length run once."""
        return self.sent * (1 if self.times is None else self.times)


@dataclass(frozen=True)
class Operation:
    """A collective in a compiled module.

    - `kind`: its kind, such as `all-gather`.
    - `module`: the module.
    - `shapes`: the shapes of its results on each device.
    - `start`: the instruction that has its operands.
    - `result`: the one that has its result; the same unless it is asynchronous.
    - `groups`: the devices that take part together, one group in each row; `None` if the
        text does not say.
    """

    kind: str
    module: Module
    shapes: tuple[Shape, ...]
    start: Instruction
    result: Instruction
    groups: np.ndarray | None

    @property
    def times(self) -> int | None:
        """How often one call of the module runs it; `None` if the text does not say."""
        return self.module.runs(self.result.computation)[0]

    @property
    def in_loop(self) -> bool:
        """True if it is in the body of a loop."""
        return self.module.runs(self.result.computation)[1]

    @property
    def bytes(self) -> int:
        """The bytes of its results on each device."""
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

    def describe(self, sizes: Mapping[str, int], **cause: Any) -> Collective:
        """The `Collective` that users see.

        **Arguments:**

        - `sizes`: the sizes of the mesh's axes; empty if they are not known.
        - `cause`: further fields of the `Collective`.
        """
        return Collective(
            kind=self.kind,
            shapes=tuple(map(str, self.shapes)),
            bytes=self.bytes,
            sent=self.sent,
            times=self.times,
            in_loop=self.in_loop,
            axes=self.axes(sizes) if sizes else None,
            **cause,
        )


def find_collectives(
    module: Module, devices: int = 1, kinds: Sequence[str] = COLLECTIVES
) -> Iterator[Operation]:
    """The collectives of a compiled module.

    **Arguments:**

    - `module`: the module.
    - `devices`: the number of devices that it is compiled for.
    - `kinds`: the opcodes to look for.
    """
    # Of an asynchronous pair, the `-done` half counts: its type is that of the result.
    for instruction in module.of_opcodes(*kinds, *(f"{kind}-done" for kind in kinds)):
        kind = instruction.opcode.removesuffix("-done")
        start = instruction
        if kind != instruction.opcode and instruction.operands:
            named = module.by_name(instruction.computation)
            start = named.get(instruction.operands[0], instruction)
        groups = _GROUPS.search(start.attributes)
        if fusion := _scatter(module, instruction):
            kind, start, instruction = "reduce-scatter", fusion, fusion
        yield Operation(
            kind=kind,
            module=module,
            shapes=instruction.shapes,
            start=start,
            result=instruction,
            groups=None if groups is None else parse_groups(groups[2], devices),
        )


def _scatter(module: Module, instruction: Instruction) -> Instruction | None:
    """The fusion that an all-reduce is a part of, if TPUs run it as a reduce-scatter."""
    if not instruction.computation.startswith("all-reduce-scatter"):
        return None
    callers = module.callers.get(instruction.computation, ())
    return callers[0] if len(callers) == 1 else None


@functools.cache
def parse_groups(text: str, devices: int) -> np.ndarray | None:
    """The groups of a collective, one in each row; `None` if their form is not known.

    **Arguments:**

    - `text`: `{{0,1},{2,3}}`; `[2,2]<=[4]`, the numbers up to four in that shape, or
        `[2,2]<=[2,2]T(1,0)`, transposed first; `mesh['x'=2,'y'=2] {'y'}`, along axes of a
        mesh, whose devices may be in another order, as in `mesh['x'=2,'y'=2],
        device_ids=([2,2]T(1,0)) {'y'}`; `{}`: all devices.
    - `devices`: the number of devices.
    """
    if text.startswith("mesh["):
        return _parse_mesh(text)
    if text.startswith("["):
        return _parse_iota(text)
    rows = re.findall(r"\{([\d, ]*)\}", text.removeprefix("{").removesuffix("}"))
    groups = [_numbers(row) for row in rows if row]
    if not groups and re.fullmatch(r"\{[{} ]*\}", text):
        return np.arange(devices)[None]
    if not groups or len({len(group) for group in groups}) > 1:
        return None
    return np.array(groups)


def join_axes(axes: Iterable[str] | None) -> str:
    """The axes of a mesh as one word: `data,fsdp`."""
    return "unknown" if axes is None else ",".join(axes)


def axes_of_groups(groups: np.ndarray, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes of a mesh along which the devices of a group differ.

    **Arguments:**

    - `groups`: from `parse_groups`.
    - `sizes`: the sizes of the axes of the mesh.

    **Returns:**

    The axes, in the order of the mesh; `None` if the groups are not of this mesh.
    """
    if groups.max(initial=0) >= math.prod(sizes.values()):
        return None
    coordinates = np.unravel_index(groups, tuple(sizes.values()))
    return tuple(axis for axis, at in zip(sizes, coordinates) if (at != at[:, :1]).any())


def _parse_iota(text: str) -> np.ndarray | None:
    found = _IOTA.fullmatch(text)
    if found is None:
        return None
    dims = _numbers(found[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if found[3]:
        ids = ids.transpose(_numbers(found[3]))
    return ids.reshape(_numbers(found[1])) if found[1] else ids


def _parse_mesh(text: str) -> np.ndarray | None:
    found = _MESH.fullmatch(text)
    if found is None:
        return None
    axes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
    ids = np.arange(math.prod(axes.values()))
    if found[2]:
        order = _parse_iota(found[2])
        ids = np.array(_numbers(found[2])) if order is None else order.ravel()
    # A part of an axis, `'x':(before)size`, becomes an axis of its own; without parts, all
    # of the axis does.
    parts = {name: (before, part) for name, before, part in _AXIS.findall(found[3])}
    dims, along = list[int](), list[int]()
    for name, size in axes.items():
        before, part = parts.get(name, ("", ""))
        pieces = [int(before or 1), int(part or size)]
        along += [len(dims) + 1] if name in parts else []
        dims += [*pieces, size // math.prod(pieces)]
    rest = [dim for dim in range(len(dims)) if dim not in along]
    count = math.prod(dims[dim] for dim in along)
    return ids.reshape(dims).transpose(*rest, *along).reshape(-1, count)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
