"""What causes a collective: a line of code, and the array that is gathered or reduced."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..sharding._mesh import BATCH_AXES
from ._communication import Operation
from ._hlo import VIEWS, Frame, Instruction, Module

_OURS = str(Path(__file__).parent.parent)
_STEP = str(Path(_OURS, "training", "_compile.py"))
_LIBRARIES = ("site-packages", "dist-packages", f"{Path(os.__file__).parent}")

#: Instructions that have the values of their first operand, or a part of them.
_VIEWS = (*VIEWS, "dynamic-slice", "slice", "copy-start")
_DEEPEST = 12


class Leaf(NamedTuple):
    """An array of the model.

    - `path`: its path.
    - `shape`: its shape on each device, as its gradient is stored.
    - `bytes`: of that.
    """

    path: str
    shape: tuple[int, ...]
    bytes: int


class Causes:
    """Finds what causes the collectives of a module.

    **Arguments:**

    - `module`: the module.
    - `sizes`: of the axes of the mesh.
    - `arguments`: the path of each array of the model, by its number among the arguments.
    - `gradients`: the trained arrays.
    """

    def __init__(
        self,
        module: Module,
        sizes: Mapping[str, int],
        arguments: Mapping[int, str],
        gradients: list[Leaf],
    ):
        self._module = module
        self._sizes = sizes
        self._arguments = arguments
        self._gradients = gradients

    def line(self, operation: Operation) -> str | None:
        """The user's line of code, `file.py:12`, or the one nearest to it."""
        return _line(self._frame(operation))

    def function(self, operation: Operation) -> str | None:
        """The function that this line is in, such as `MLP.__call__`."""
        frame = self._frame(operation)
        return None if frame is None else frame.function or None

    def _frame(self, operation: Operation) -> Frame | None:
        queue, seen = [operation.start], set[str]()
        for _ in range(_DEEPEST):
            if not queue:
                return None
            for instruction in queue:
                if found := _user_frame(self._module.stack(instruction)):
                    return found
            queue = [x for each in queue for x in self._operands(each, seen)]
        return None

    def leaves(self, operation: Operation) -> tuple[str, ...]:
        """The arrays of the model that it gathers, or whose gradients it reduces."""
        gathered = {
            self._arguments[number]
            for operand in self._operands(operation.start, set())
            for number in self._origins(operand, None, 0)
            if number in self._arguments
        }
        reduces = operation.kind in ("all-reduce", "reduce-scatter")
        axes = operation.axes(self._sizes) or ()
        if gathered or not reduces or {*BATCH_AXES}.isdisjoint(axes):
            return tuple(sorted(gathered))
        found = set[str]()
        for dims in self._joined(operation):
            # In a loop it is one layer, or in each microbatch all of an array.
            layer = self._reduced(dims, 1) if operation.in_loop else []
            found |= {*(layer or self._reduced(dims, 0))}
        return tuple(sorted(found))

    def depends_on(self, operation: Operation) -> Iterator[str]:
        """The arguments that what it moves is computed from, as the text names them.

        Loops are followed value by value, so what only passes through one with the model
        does not depend on the model.
        """
        queue: list[tuple[Instruction, int | None]] = [(operation.start, None)]
        seen = set[tuple[str, str, int | None]]()
        while queue:
            value, element = queue.pop()
            key = (value.computation, value.name, element)
            if key in seen:
                continue
            seen.add(key)
            if value.opcode == "parameter" and value.computation == self._module.entry:
                yield value.op_name.replace("\\", "")
            else:
                queue += self._made_of(value, element)

    def _made_of(
        self, value: Instruction, element: int | None
    ) -> list[tuple[Instruction, int | None]]:
        """What a value, or one element of a tuple, is computed from."""
        if value.opcode == "parameter":
            found = []
            for caller in self._module.callers.get(value.computation, ()):
                if caller.opcode == "while":
                    found.append((caller, element))
                elif caller.opcode in ("fusion", "call"):
                    name = caller.operands[int(value.content)]
                    found.append((self._module.by_name[caller.computation, name], element))
                else:
                    found += [(x, None) for x in self._operands(caller, set())]
            return found
        operands = self._operands(value, set())
        if value.opcode == "get-tuple-element":
            return [(x, int(value.attribute("index") or 0)) for x in operands]
        if value.opcode == "tuple" and element is not None:
            return [
                (self._module.by_name[value.computation, value.operands[element]], None)
            ]
        roots = [
            (self._module.computations[name][-1], element)
            for use, name in value.called()
            if (value.opcode, use)
            in (("while", "body"), ("fusion", "calls"), ("call", "to_apply"))
        ]
        if value.opcode == "while":
            return roots + [(x, element) for x in operands]
        return roots or [(x, None) for x in operands]

    def _joined(self, operation: Operation) -> list[tuple[int, ...]]:
        """The shapes of what it reduces: compilers join gradients into one of one dim."""
        whole = [shape.dims for shape in operation.shapes]
        if len(whole) > 1 or len(whole[0]) > 1:
            return whole
        parts = [
            shape.dims
            for operand in self._operands(operation.start, set())
            for part in self._operands(operand, set())
            for shape in part.shapes
        ]
        # If they are not all of it, something else is computed of them.
        return parts if sum(map(math.prod, parts)) == math.prod(whole[0]) else whole

    def _reduced(self, dims: tuple[int, ...], first: int) -> list[str]:
        """The arrays whose dims, from the first on, these are."""
        wanted, found = _plain(dims), []
        for leaf in self._gradients:
            shape = leaf.shape[first:]
            # What is joined has one dim, whatever it had before.
            if wanted and wanted in (_plain(shape), [math.prod(shape)]):
                found.append(leaf.path)
        return found

    def line_of(self, instruction: Instruction) -> str | None:
        """The user's line of code that an instruction itself is from."""
        return _line(_user_frame(self._module.stack(instruction)))

    def _operands(self, instruction: Instruction, seen: set[str]) -> list[Instruction]:
        found = []
        for name in instruction.operands:
            operand = self._module.by_name.get((instruction.computation, name))
            if operand is not None and name not in seen:
                seen.add(name)
                found.append(operand)
        return found

    def _origins(
        self, instruction: Instruction, element: int | None, depth: int
    ) -> set[int]:
        """The numbers of the arguments that a value is, is a part of, or is cast from."""
        if depth > 4 * _DEEPEST:
            return set()
        opcode, operands = instruction.opcode, self._operands(instruction, set())
        after = depth + 1
        if opcode == "parameter":
            return self._origins_of_parameter(instruction, element, after)
        if opcode == "get-tuple-element":
            number = int(instruction.attribute("index") or 0)
            return self._origins(operands[0], number, after) if operands else set()
        if opcode == "tuple":
            name = instruction.operands[element or 0]
            found = self._module.by_name.get((instruction.computation, name))
            return set() if found is None else self._origins(found, None, after)
        if opcode in _VIEWS or opcode.endswith("-done"):
            return self._origins(operands[0], element, after) if operands else set()
        if opcode == "fusion":
            names = [name for _, name in instruction.called()]
            inside = self._module.computations.get(names[0], ()) if names else ()
            if any(x.opcode in ("dot", "reduce", "scatter") for x in inside) or not inside:
                return set()
            return self._origins(inside[-1], element, after)
        return set()

    def _origins_of_parameter(
        self, parameter: Instruction, element: int | None, depth: int
    ) -> set[int]:
        computation = parameter.computation
        if computation == self._module.entry:
            found = re.search(r"arrays\[(\d+)\]", parameter.op_name)
            return {int(found[1])} if found else set()
        callers = self._module.callers.get(computation, ())
        if len(callers) != 1:
            return set()
        operands = self._operands(callers[0], set())
        if callers[0].opcode == "fusion":
            number = int(parameter.content)
            name = callers[0].operands[number]
            found = self._module.by_name.get((callers[0].computation, name))
            return set() if found is None else self._origins(found, None, depth)
        if callers[0].opcode != "while" or element is None or not operands:
            return set()
        # The same in each iteration, or else it is computed in the loop.
        root = self._module.computations[computation][-1]
        if root.opcode != "tuple" or element >= len(root.operands):
            return set()
        kept = self._module.by_name.get((computation, root.operands[element]))
        same = ("copy", "copy-start", "copy-done", "bitcast")
        while kept is not None and kept.opcode in same:
            kept = self._module.by_name.get((computation, kept.operands[0]))
        if kept is None or kept.opcode != "get-tuple-element":
            return set()
        if kept.attribute("index") != str(element):
            return set()
        return self._origins(operands[0], element, depth)


def user_line(stack: Iterable[Frame]) -> str | None:
    """The innermost line of a stack that is neither this library's nor another's."""
    return _line(_user_frame(stack))


def _user_frame(stack: Iterable[Frame]) -> Frame | None:
    for frame in stack:
        if frame.file == _STEP:
            return None  # What follows is the line that calls the step.
        ours = frame.file.startswith(_OURS)
        known = frame.file and not frame.file.startswith("<")
        if known and not ours and not any(part in frame.file for part in _LIBRARIES):
            return frame
    return None


def _line(frame: Frame | None) -> str | None:
    return None if frame is None else f"{Path(frame.file).name}:{frame.line}"


def _plain(dims: tuple[int, ...]) -> list[int]:
    """Dims in any order, without those of one."""
    return sorted(n for n in dims if n != 1)
