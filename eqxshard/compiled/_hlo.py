"""The text of a compiled module: its instructions, and how often each one runs."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|\w+_computations?)=(?:%([\w.-]+)|\{(%[^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


class Shape(NamedTuple):
    """The type of an array, such as `f32[8,64]`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its bytes; `pred` has one for each element, and `token` has none."""
        bits = re.search(r"\d+", self.dtype)
        each = int(bits[0]) if bits else 8 * (self.dtype == "pred")
        return -(-math.prod(self.dims) * each // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """`%name = type opcode(operands), attributes`."""

    name: str
    computation: str
    type: str
    opcode: str
    #: What is between the parentheses: of a constant its value.
    content: str
    attributes: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The types of its results."""
        return parse_shapes(self.type)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands; of a part of a tuple, as JAX 0.12 writes it, `x#1`."""
        # Some compilers write their types, too.
        return tuple(re.findall(r"%([\w.-]+(?:#\d+)?)", self.content))

    @property
    def op_name(self) -> str:
        """Where in the program it is from, such as `jit(f)/jvp()/dot_general`."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def argument(self) -> str:
        """Of a parameter: what the program calls it, such as `params['weight']`."""
        return self.op_name.replace("\\", "")

    def attribute(self, name: str) -> str | None:
        """An attribute that is written as `name={...}` or `name=word`."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1] if found else None

    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it calls, each after what it calls it for."""
        for attribute, one, several in _CALLED.findall(self.attributes):
            for name in [one] if one else re.findall(r"%([\w.-]+)", several):
                yield attribute, name


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The types of arrays in the type of a result."""
    # A dim of dynamic size is written `<=8`.
    return tuple(
        Shape(dtype, tuple(int(n) for n in re.findall(r"\d+", dims)))
        for dtype, dims in _SHAPE.findall(text)
    )


class Frame(NamedTuple):
    """A place in the code: a file, a line, and the function that it is in."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The line as people write it: `model.py:12`."""
        return f"{Path(self.file).name}:{self.line}"


#: Opcodes of another form of the same values as the first operand's.
VIEWS = ("bitcast", "convert", "copy", "opt-barrier", "reshape", "transpose")


@dataclass(frozen=True)
class Module:
    """A compiled module.

    - `entry`: the name of the computation that a call runs.
    - `computations`: the instructions of each, in the order in which they run.
    - `text`: all of its text.
    """

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]
    text: str

    @functools.cached_property
    def frames(self) -> Mapping[int, tuple[Frame, int]]:
        """Each frame of a stack, by number, and the number of its caller."""
        return _parse_frames(self.text)

    @functools.cached_property
    def by_name(self) -> Mapping[tuple[str, str], Instruction]:
        """Each instruction, by its computation and its name; parts of tuples as well."""
        found = {(x.computation, x.name): x for x in self.instructions()}
        for instruction in self.instructions():
            here = instruction.computation
            for name in instruction.operands:
                if "#" in name and (here, name) not in found:
                    found[here, name] = _tuple_part(name, here, found)
        return found

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """What an instruction takes, in order."""
        names = [(instruction.computation, name) for name in instruction.operands]
        return [self.by_name[name] for name in names if name in self.by_name]

    def takers(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that take its result."""
        return self.users.get((instruction.computation, instruction.name), [])

    @functools.cached_property
    def users(self) -> Mapping[tuple[str, str], list[Instruction]]:
        """The instructions that take each one's result, by its computation and name."""
        found: dict[tuple[str, str], list[Instruction]] = {}
        for instruction in self.instructions():
            for name in dict.fromkeys(instruction.operands):
                found.setdefault((instruction.computation, name), []).append(instruction)
        return found

    def instructions(self) -> Iterator[Instruction]:
        """All instructions."""
        for instructions in self.computations.values():
            yield from instructions

    @functools.cached_property
    def runs(self) -> Callable[[str], tuple[int | None, bool]]:
        """How often a call runs a computation, if it is known; whether in a loop."""

        @functools.cache
        def runs(computation: str) -> tuple[int | None, bool]:
            times: int | None = int(computation == self.entry)
            in_loop = False
            for caller in self.callers.get(computation, ()):
                outer, is_inside = runs(caller.computation)
                factor = self.trips(caller)
                if times is None or outer is None or factor is None:
                    times = None
                else:
                    times += outer * factor
                in_loop |= is_inside or caller.opcode == "while"
            return times, in_loop

        return runs

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions that call each computation."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions():
            for _, name in instruction.called():
                found.setdefault(name, []).append(instruction)
        return {name: tuple(callers) for name, callers in found.items()}

    def trips(self, caller: Instruction) -> int | None:
        """How often an instruction runs what it calls."""
        if caller.opcode != "while":
            return 1
        if trips := _TRIPS.search(caller.attributes):
            return int(trips[1])
        return self._trips_of_condition(caller)

    def _trips_of_condition(self, loop: Instruction) -> int | None:
        """From the constants of a loop that counts up, as those of `lax.scan` do."""
        called = dict(loop.called())
        compare = self._root(called.get("condition"))
        if compare is None or "direction=LT" not in compare.attributes:
            return None
        counter, bound = self._operand(compare, 0), self._operand(compare, 1)
        if counter is None or counter.opcode != "get-tuple-element":
            return None
        # What the counter is at first, and after an iteration.
        index = int(counter.attribute("index") or 0)
        first = self._operand(self._operand(loop, 0), index)
        after = self._operand(self._root(called.get("body")), index)
        if after is None or after.opcode != "add":
            return None
        start, stop = _integer(first), _integer(bound)
        step = _integer(self._operand(after, 0)) or _integer(self._operand(after, 1))
        if start is None or stop is None or not step:
            return None
        return max(-((start - stop) // step), 0)

    def _root(self, computation: str | None) -> Instruction | None:
        """What a computation returns, in its first form."""
        instructions = self.computations.get(computation or "", ())
        return self._first_form(instructions[-1]) if instructions else None

    def _operand(self, instruction: Instruction | None, index: int) -> Instruction | None:
        """What an instruction takes at a position, in its first form."""
        operands = self.operands(instruction) if instruction else []
        return self._first_form(operands[index]) if index < len(operands) else None

    def _first_form(self, value: Instruction) -> Instruction | None:
        """A value before it is copied or cast, wherever fusions compute it."""
        if value.opcode in VIEWS:
            return self._operand(value, 0)
        if value.opcode == "fusion":
            return self._root(dict(value.called())["calls"])
        callers = self.callers.get(value.computation, ())
        if value.opcode == "parameter" and callers and callers[0].opcode == "fusion":
            return self._operand(callers[0], int(value.content))
        return value

    def stack(self, instruction: Instruction) -> Iterator[Frame]:
        """The places in the code that an instruction is from, innermost first."""
        found = _FRAME.search(instruction.attributes)
        number, seen = int(found[1]) if found else 0, set[int]()
        while number in self.frames and number not in seen:
            seen.add(number)
            frame, number = self.frames[number]
            yield frame


def _integer(instruction: Instruction | None) -> int | None:
    """The value of a constant that is one integer."""
    if instruction is None or instruction.opcode != "constant":
        return None
    is_integer = re.match(r"\s*[su]\d+\[\]", instruction.type)
    return int(instruction.content) if is_integer else None


def parse_module(text: str) -> Module:
    """Parse the text of a compiled module."""
    entry, here = "", ""
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            here = header[2]
            entry = here if header[1] else entry
            computations[here] = []
        elif here and (found := _INSTRUCTION.match(line)):
            instruction = _parse_instruction(found[1], here, found[2])
            if instruction is not None:
                computations[here].append(instruction)
    fixed = {name: tuple(content) for name, content in computations.items()}
    return Module(entry, fixed, text)


def _parse_instruction(name: str, computation: str, rest: str) -> Instruction | None:
    opcode = _OPCODE.search(rest)
    if opcode is None:
        return None
    depth, end = 1, opcode.end()
    for end in range(opcode.end(), len(rest)):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        if depth == 0:
            break
    content = rest[opcode.end() : end]
    type_ = rest[: opcode.start()]
    return Instruction(name, computation, type_, opcode[1], content, rest[end + 1 :])


def _tuple_part(
    name: str, computation: str, known: Mapping[tuple[str, str], Instruction]
) -> Instruction:
    """The get-tuple-element that `x#1` stands for."""
    whole, _, number = name.partition("#")
    maker = known.get((computation, whole))
    shapes = maker.shapes[int(number) :] if maker else ()
    type_ = str(shapes[0]) if shapes else ""
    content, attributes = f"%{whole}", f", index={number}"
    return Instruction(name, computation, type_, "get-tuple-element", content, attributes)


def _parse_frames(text: str) -> dict[int, tuple[Frame, int]]:
    """The tables at the head of the text: names of files, places in them, frames."""
    files, functions = _names(text, "FileNames"), _names(text, "FunctionNames")
    places = {
        int(i): Frame(files.get(int(file), ""), int(line), functions.get(int(name), ""))
        for i, file, name, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)",
            _table(text, "FileLocations"),
            re.M,
        )
    }
    found = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
        _table(text, "StackFrames"),
        re.M,
    )
    # Of a frame that nothing called, some versions write 1, and all others are one too
    # high with it.
    above = 0 if any(int(up or 0) == 0 for _, _, up in found) else 1
    return {int(i): (places[int(at)], int(up or 0) - above) for i, at, up in found}


def _names(text: str, head: str) -> dict[int, str]:
    return {
        int(i): name for i, name in re.findall(r'^(\d+) "(.*)"$', _table(text, head), re.M)
    }


def _table(text: str, head: str) -> str:
    """One of the tables at the head."""
    start = text.find(f"\n{head}\n")
    return text[start + len(head) + 2 : text.find("\n\n", start + 1)] if start >= 0 else ""
