"""The causes of a collective: the line of code, and the arrays gathered or reduced."""

import functools
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..sharding._mesh import batch_axes
from ._communication import Operation
from ._hlo import VIEWS, Frame, Instruction, Module

_OURS = os.path.join(Path(__file__).parent.parent, "")
_STEP = str(Path(_OURS, "training", "_jit.py"))
_PYTHONS = os.path.join(Path(os.__file__).parent, "")
_INSTALLED = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))

#: Instructions whose result is their first operand, a part of it, or a multiple of it.
_VIEWS = (*VIEWS, "dynamic-slice", "slice", "copy-start", "divide")
#: Instructions that pass on the results of others.
_PASS = ("call", "fusion", "get-tuple-element", "parameter", "tuple", "while")
#: How many instructions away from a collective a line of code still counts as its cause.
_DEEPEST = 12


@dataclass(frozen=True)
class Causes:
    """Finds what causes the collectives of a module.

    - `module`: the module.
    - `sizes`: the sizes of the axes of the mesh.
    - `arguments`: the path of each array of the model, by its name in the text.
    - `gradients`: the shape of each gradient on a device, by the path of the trained array.
    - `batch_axes`: the axes that gradients are reduced over; by default, the axes of the
        batch in our meshes.
    """

    module: Module
    sizes: Mapping[str, int]
    arguments: Mapping[str, str]
    gradients: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch_axes: Collection[str] | None = None

    def frame(self, operation: Operation, *, of_use: bool = False) -> Frame | None:
        """The place in the user's code that a collective is from, or the nearest one.

        With `of_use`, the place that first uses its result. A gather that a step adds by
        itself is from no place in the user's code, but its result is used at one.
        """
        queue = self.module.takers(operation.result) if of_use else [operation.start]
        follow = self.module.takers if of_use else self.module.operands
        seen = set[str]()
        for _ in range(_DEEPEST):
            for instruction in queue:
                if found := user_frame(self.module.stack(instruction)):
                    return found
            seen |= {each.name for each in queue}
            queue = [x for each in queue for x in follow(each) if x.name not in seen]
        return None

    def leaves(self, operation: Operation) -> tuple[str, ...]:
        """The arrays of the model that it gathers, or whose gradients it reduces."""
        gathered = set[str]()
        for operand in self.module.operands(operation.start):
            for parameter in self._parameters(operand, same_values=True):
                if parameter.argument in self.arguments:
                    gathered.add(self.arguments[parameter.argument])
        reduces = operation.kind in ("all-reduce", "reduce-scatter")
        axes = operation.axes(self.sizes) or ()
        rows = batch_axes(self.sizes) if self.batch_axes is None else self.batch_axes
        if gathered or not reduces or {*rows}.isdisjoint(axes):
            return tuple(sorted(gathered))
        # In a loop over layers it reduces the gradient of one layer; in a loop over
        # microbatches, the whole gradient.
        layers, reduced = self._layers_around(operation.start.computation), set[str]()
        for dims in self._joined(operation):
            found = self._reduced(dims, 1 if layers else 0)
            reduced |= {x for x in found if not layers or self.gradients[x][0] in layers}
        return tuple(sorted(reduced))

    def _layers_around(self, computation: str) -> set[int]:
        """How many layers there are, if a computation runs for each of them."""
        found, queue, seen = set[int](), [computation], set[str]()
        while queue:
            here = queue.pop()
            seen.add(here)
            if here != self.module.entry:
                found |= self._layers.get(here, set())
            callers = self.module.callers.get(here, ())
            queue += [x.computation for x in callers if x.computation not in seen]
        return found

    @functools.cached_property
    def _layers(self) -> Mapping[str, set[int]]:
        """For each loop over layers, by its body: how many layers its arrays have.

        The loop reads or writes one layer of an array at a time; the whole array has as
        many elements as a gradient.
        """
        stacks = {(x[0], math.prod(x)) for x in self.gradients.values() if len(x) > 1}
        found = defaultdict[str, set[int]](set)
        for instruction in self.module.instructions():
            if instruction.opcode not in ("dynamic-slice", "dynamic-update-slice"):
                continue
            whole, *rest = self.module.operands(instruction)
            part = rest[0] if instruction.opcode == "dynamic-update-slice" else instruction
            dims, layer = whole.shapes[0].dims, math.prod(part.shapes[0].dims)
            if dims and (dims[0], dims[0] * layer) in stacks and math.prod(dims) > layer:
                found[self._body(instruction.computation)].add(dims[0])
        return found

    def _body(self, computation: str) -> str:
        """The body of the loop around a computation, or else its outermost caller."""
        for caller in self.module.callers.get(computation, ()):
            if caller.opcode != "while":
                return self._body(caller.computation)
        return computation

    def depends_on(self, operation: Operation) -> Iterator[str]:
        """The arguments that a collective's data is computed from, as the text names them.

        Loops are followed value by value, so a value that only passes through a loop beside
        the model does not depend on the model.
        """
        for parameter in self._parameters(operation.start, same_values=False):
            yield parameter.argument

    def _parameters(
        self, start: Instruction, *, same_values: bool
    ) -> Iterator[Instruction]:
        """The parameters of the module that a value is computed from.

        **Arguments:**

        - `start`: the instruction of the value.
        - `same_values`: whether the value must be a parameter, a part of it, or a cast of
            it.
        """
        queue: list[tuple[Instruction, int | None]] = [(start, None)]
        seen = set[tuple[str, str, int | None]]()
        while queue:
            value, element = queue.pop()
            key = (value.computation, value.name, element)
            if key in seen:
                continue
            seen.add(key)
            if value.opcode == "parameter" and value.computation == self.module.entry:
                yield value
            elif same_values and (value.opcode in _VIEWS or value.opcode.endswith("-done")):
                queue += [(x, element) for x in self.module.operands(value)[:1]]
            elif not same_values or value.opcode in _PASS:
                queue += self._made_of(value, element)

    def _made_of(
        self, value: Instruction, element: int | None
    ) -> list[tuple[Instruction, int | None]]:
        """The values that a value, or one element of a tuple, is computed from."""
        operands = self.module.operands(value)
        if value.opcode == "parameter":
            found = []
            for caller in self.module.callers.get(value.computation, ()):
                inputs = self.module.operands(caller)
                if caller.opcode == "while":
                    found.append((caller, element))
                elif caller.opcode in ("fusion", "call"):
                    found.append((inputs[int(value.content)], element))
                else:
                    found += [(x, None) for x in inputs]
            return found
        if value.opcode == "get-tuple-element":
            return [(x, int(value.attribute("index") or 0)) for x in operands]
        if value.opcode == "tuple" and element is not None:
            return [(operands[element], None)]
        roots = [
            (self.module.computations[name][-1], element)
            for use, name in value.called()
            if (value.opcode, use)
            in (("while", "body"), ("fusion", "calls"), ("call", "to_apply"))
        ]
        if value.opcode in ("while", "opt-barrier"):
            return roots + [(x, element) for x in operands]
        return roots or [(x, None) for x in operands]

    def _joined(self, operation: Operation) -> list[tuple[int, ...]]:
        """The shapes of the arrays that it reduces, which compilers may join into one."""
        whole = [shape.dims for shape in operation.shapes]
        parts = [
            shape.dims
            for operand in self.module.operands(operation.start)
            for part in self.module.operands(operand)
            for shape in part.shapes
        ]
        is_joined = len(whole) == len(whole[0]) == 1
        # If they do not make up the whole, something else is computed from them.
        return parts if is_joined and sum(map(math.prod, parts)) == whole[0][0] else whole

    def _reduced(self, dims: tuple[int, ...], first: int) -> list[str]:
        """The arrays whose gradient has these dims, from dim `first` on, or in one dim."""
        wanted = plain_dims(dims)
        return [
            path
            for path, shape in self.gradients.items()
            if wanted and wanted in (plain_dims(shape[first:]), [math.prod(shape[first:])])
        ]


def user_frame(stack: Iterable[Frame]) -> Frame | None:
    """The innermost place of a stack that is in the user's code."""
    for frame in stack:
        if frame.file == _STEP:
            return None  # What follows is the line that calls the step.
        if is_users(frame.file):
            return frame
    return None


def is_ours(file: str) -> bool:
    """True if a file of source code is this library's."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """True if a file of source code is the user's: not a library's, and not Python's.

    Files such as `<string>`, which libraries make up, are not the user's.
    """
    if not file or file.startswith(("<", _OURS, _PYTHONS)):
        return False
    return not any(folder in file for folder in _INSTALLED)


def plain_dims(dims: Iterable[int]) -> list[int]:
    """Dims without those of size 1, sorted."""
    return sorted(n for n in dims if n != 1)
