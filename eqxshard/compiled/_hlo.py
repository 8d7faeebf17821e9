"""The text of a compiled module: its instructions, and how often each one runs."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([^\s=]+) = ")
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
    #: The text between the parentheses: operands, or the value of a constant.
    content: str
    attributes: str

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The types of its results."""
        return parse_shapes(self.type)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of its operands; `x#1` is a part of a tuple, as JAX 0.12 writes it."""
        # Some compilers write their types, too.
        return tuple(re.findall(r"%([\w.-]+(?:#\d+)?)", self.content))

    @property
    def op_name(self) -> str:
        """The place in the program that it is from: `jit(f)/jvp()/dot_general`."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def argument(self) -> str:
        """The program's name for a parameter, such as `params['weight']`."""
        return self.op_name.replace("\\", "")

    def attribute(self, name: str) -> str | None:
        """An attribute that is written as `name={...}` or `name=word`."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1] if found else None

    def called(self) -> Iterator[tuple[str, str]]:
        """The computations that it calls, each after its role, such as `body`."""
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


#: The opcodes of instructions that return their first operand in another form.
VIEWS = ("bitcast", "convert", "copy", "opt-barrier", "reshape", "transpose")


@dataclass(frozen=True)
class Module:
    """A compiled module.

    - `entry`: the name of the computation that a call runs.
    - `bodies`: the text of the instructions of each computation.
    - `text`: all of its text.
    """

    entry: str
    bodies: Mapping[str, str]
    text: str

    @functools.cached_property
    def computations(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The instructions of each computation, in the order in which they run."""
        return _Computations(self.bodies)

    @functools.cached_property
    def frames(self) -> Mapping[int, tuple[Frame, int]]:
        """Each frame of a stack, by number, and the number of its caller."""
        return _parse_frames(self.text)

    @functools.cached_property
    def by_name(self) -> Callable[[str], Mapping[str, Instruction]]:
        """The instructions of a computation by name; parts of tuples as well."""

        @functools.cache
        def by_name(computation: str) -> Mapping[str, Instruction]:
            instructions = self.computations.get(computation, ())
            found = {each.name: each for each in instructions}
            for instruction in instructions:
                if "#" in instruction.content:
                    for name in instruction.operands:
                        if "#" in name and name not in found:
                            found[name] = _tuple_part(name, computation, found)
            return found

        return by_name

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction, in order."""
        known = self.by_name(instruction.computation)
        return [known[name] for name in instruction.operands if name in known]

    def takers(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that take an instruction's result."""
        return self.users(instruction.computation).get(instruction.name, [])

    @functools.cached_property
    def users(self) -> Callable[[str], Mapping[str, list[Instruction]]]:
        """The instructions of a computation that take each one's result, by its name."""

        @functools.cache
        def users(computation: str) -> Mapping[str, list[Instruction]]:
            found: dict[str, list[Instruction]] = {}
            for instruction in self.computations.get(computation, ()):
                for name in dict.fromkeys(instruction.operands):
                    found.setdefault(name, []).append(instruction)
            return found

        return users

    def instructions(self) -> Iterator[Instruction]:
        """All instructions."""
        for instructions in self.computations.values():
            yield from instructions

    def of_opcodes(self, *opcodes: str) -> Iterator[Instruction]:
        """The instructions with some opcodes. Others are not parsed."""
        found = self._written_with(*(f" {opcode}(" for opcode in opcodes))
        return (each for each in found if each.opcode in opcodes)

    def parameters(self) -> Iterator[Instruction]:
        """The parameters of the module. Other instructions are not parsed."""
        found = _parse(self.bodies.get(self.entry, ""), self.entry, " parameter(")
        return (each for each in found if each.opcode == "parameter")

    def _written_with(self, *texts: str) -> Iterator[Instruction]:
        """The instructions whose text has one of these in it."""
        for computation, body in self.bodies.items():
            if any(text in body for text in texts):
                yield from _parse(body, computation, *texts)

    @functools.cached_property
    def runs(self) -> Callable[[str], tuple[int | None, bool]]:
        """How often a call runs a computation, if that is known, and whether in a loop."""

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
        for instruction in self._written_with("=%", "={%"):
            for _, name in instruction.called():
                found.setdefault(name, []).append(instruction)
        return {name: tuple(callers) for name, callers in found.items()}

    def trips(self, caller: Instruction) -> int | None:
        """How often an instruction runs the computations that it calls, if it is known."""
        if caller.opcode != "while":
            return 1
        if trips := _TRIPS.search(caller.attributes):
            return int(trips[1])
        return self._trips_of_condition(caller)

    def _trips_of_condition(self, loop: Instruction) -> int | None:
        """The trips of a loop that counts up between constants, as in `lax.scan`."""
        called = dict(loop.called())
        compare = self._root(called.get("condition"))
        if compare is None or "direction=LT" not in compare.attributes:
            return None
        counter, bound = self._operand(compare, 0), self._operand(compare, 1)
        if counter is None or counter.opcode != "get-tuple-element":
            return None
        # The counter before the loop, and after an iteration.
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
        """The value that a computation returns, before copies and casts."""
        instructions = self.computations.get(computation or "", ())
        return self._first_form(instructions[-1]) if instructions else None

    def _operand(self, instruction: Instruction | None, index: int) -> Instruction | None:
        """The operand of an instruction at a position, before copies and casts."""
        operands = self.operands(instruction) if instruction else []
        return self._first_form(operands[index]) if index < len(operands) else None

    def _first_form(self, value: Instruction) -> Instruction | None:
        """A value before copies and casts, inside or outside of fusions."""
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


class _Computations(Mapping[str, tuple[Instruction, ...]]):
    """The instructions of each computation, parsed when they are first needed."""

    def __init__(self, bodies: Mapping[str, str]):
        self._bodies = bodies
        self._parsed: dict[str, tuple[Instruction, ...]] = {}

    def __getitem__(self, name: str) -> tuple[Instruction, ...]:
        if name not in self._parsed:
            self._parsed[name] = tuple(_parse(self._bodies[name], name))
        return self._parsed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bodies)

    def __len__(self) -> int:
        return len(self._bodies)


def parse_module(text: str) -> Module:
    """Split the text of a compiled module into computations.

    Their instructions are parsed when they are first needed: the text of a deep model has
    megabytes, of which lint needs little.
    """
    bodies = dict[str, str]()
    entry, here, body, end = "", "", 0, 0
    # Only the first line of a computation ends in a brace.
    while end := text.find("{\n", end) + 1:
        start = text.rfind("\n", 0, end) + 1
        if head := _COMPUTATION.match(text[start:end]):
            if here:
                bodies[here] = text[body:start]
            here, body = head[2], end
            entry = here if head[1] else entry
    if here:
        bodies[here] = text[body:]
    return Module(entry, bodies, text)


def _parse(body: str, computation: str, *texts: str) -> Iterator[Instruction]:
    """The instructions of a computation; only those with one of `texts`, if given."""
    for line in body.splitlines():
        if texts and not any(text in line for text in texts):
            continue
        named = _INSTRUCTION.match(line)
        opcode = named and _OPCODE.search(line, named.end())
        if not named or not opcode:
            continue
        start = opcode.end()
        end = line.find(")", start)
        while end >= 0 and line.count("(", start, end) > line.count(")", start, end):
            end = line.find(")", end + 1)
        yield Instruction(
            name=named[1],
            computation=computation,
            type=line[named.end() : opcode.start()],
            opcode=opcode[1],
            content=line[start:end],
            attributes=line[end + 1 :],
        )


def _tuple_part(
    name: str, computation: str, known: Mapping[str, Instruction]
) -> Instruction:
    """The get-tuple-element that `x#1` stands for."""
    whole, _, number = name.partition("#")
    maker = known.get(whole)
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
    # For a frame without a caller, some versions write 1 in place of 0; then the numbers of
    # all callers are one too high.
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
