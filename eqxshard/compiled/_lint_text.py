"""Lint of the text of a compiled step: what it sends, computes twice and keeps twice.

What looks like a finding and may be none is none: arrays below 64 kB (but for the batch
itself), collectives of the user's own per-device code, and everything that the text does
not say for sure.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..sharding._mesh import BATCH_AXES
from ..sharding._spec import axes_of
from ..sharding._text import comma_list
from ._causes import Causes
from ._communication import Operation, find_collectives
from ._findings import REWRITTEN, SMALL, Finding
from ._hlo import VIEWS, Instruction, Module, parse_shapes

_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
#: What passes a gathered array on to a loop.
_PASS = (*VIEWS, "fusion", "get-tuple-element")
_DEEPEST = 6
_ARGUMENT = re.compile(r"^arrays\[(\d+)\]")
_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization.*?HLO operation %?(\S+) = (\S+) ([^\n]*)"
)


class Argument(NamedTuple):
    """An array that a step takes.

    - `path`, `shape`, `bytes`: of the whole array.
    - `spec`: how it is split between steps.
    - `donated`: whether its memory is to be reused.
    - `in_model`: whether it belongs to the model.
    """

    path: str
    shape: tuple[int, ...]
    bytes: int
    spec: Sequence[object]
    donated: bool
    in_model: bool


class TextLint:
    """The findings in the text of a step.

    **Arguments:**

    - `module`: the compiled text.
    - `sizes`: of the axes of the mesh.
    - `arguments`: the arrays that it takes first.
    - `batch`: the path and shape of each array of a batch, by its name in the text.
    - `microbatches`: how many parts of a batch it takes in turn.
    """

    def __init__(
        self,
        module: Module,
        sizes: Mapping[str, int],
        arguments: Sequence[Argument],
        batch: Mapping[str, tuple[str, tuple[int, ...]]],
        microbatches: int = 1,
    ):
        self._module = module
        self._sizes = sizes
        self._arguments = arguments
        others = [i for i, each in enumerate(arguments) if not each.in_model]
        #: The step, keys and the optimizer's state, as the text names them.
        self._other_arguments = {f"arrays[{i}]" for i in others}
        model = [(i, each) for i, each in enumerate(arguments) if each.in_model]
        self._by_path = {each.path: each for _, each in model}
        paths = {i: each.path for i, each in model}
        self._batch_axes = {axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1}
        self._causes = Causes(module, sizes, paths, [])
        self._batch = {name: path for name, (path, _) in batch.items()}
        shapes = [shape for _, shape in batch.values()]
        self._batch_shapes = dict(batch.values())
        self._rows = min((shape[0] for shape in shapes), default=0) // microbatches
        self._row_counts = _row_counts(shapes, microbatches)
        self._array_sizes = self._sizes_of_arrays()

    def findings(self, stderr: str) -> Iterator[Finding]:
        """All of them; `stderr` is what the compiler wrote there."""
        collectives = [
            operation
            for operation in find_collectives(self._module, math.prod(self._sizes.values()))
            # In per-device code, the user gathers on purpose; and our rewrites do.
            if not any(x in operation.start.op_name for x in ("shard_map", REWRITTEN))
        ]
        gathers = [
            (operation, self._causes.leaves(operation))
            for operation in collectives
            if operation.kind == "all-gather"
        ]
        of_batch = self._of_batch(collectives)
        yield from self._batch_itself(of_batch)
        by_layer = {
            path
            for op, paths in gathers
            for path in paths
            if self._one_layer(op, self._by_path[path])
        }
        for operation, paths in gathers:
            if not any(operation is each for each, _ in of_batch):
                yield from self._global_batch(operation, paths)
            for path in paths if operation.bytes >= SMALL else ():
                yield from self._gathered(operation, self._by_path[path], by_layer)
        yield from self._donation()
        yield from self._rematerialization(stderr)

    def _of_batch(
        self, collectives: Sequence[Operation]
    ) -> list[tuple[Operation, set[str]]]:
        """Those that move what is computed from entries of the batch, and not the model."""
        found = []
        for operation in collectives:
            if not self._batch_axes & {*(operation.axes(self._sizes) or ())}:
                continue
            entries = set[str]()
            for name in self._causes.depends_on(operation):
                if name in self._batch:
                    entries.add(self._batch[name])
                elif name not in self._other_arguments:
                    break
            else:
                found += [(operation, entries)] if entries else []
        return found

    def _batch_itself(self, moved: list[tuple[Operation, set[str]]]) -> Iterator[Finding]:
        """Entries of which each device gets all rows, in one gather or row by row."""
        lines = dict[str, str | None]()
        pieces = dict[str, int]()
        for operation, entries in moved:
            for entry in sorted(entries):
                # A loop of Python's over all examples is as many small broadcasts; an
                # all-to-all brings a device no more than it gives away.
                if operation.kind != "all-to-all":
                    pieces[entry] = pieces.get(entry, 0) + len(operation.shapes)
                at_once = operation.kind == "all-gather" or self._is_summed_rows(operation)
                if at_once or pieces.get(entry, 0) >= self._rows:
                    line = self._causes.line(operation) or self._line_of_use(operation)
                    lines.setdefault(entry, line)
        for entry, line in lines.items():
            yield Finding(
                "global-batch",
                entry,
                line,
                f"{entry} {self._batch_shapes[entry]} is gathered: every device gets the "
                f"rows of all others, over {comma_list(sorted(self._batch_axes))}, and may "
                "compute with all of them. Use jax.vmap in place of a loop over examples "
                "(jax.lax.map, jax.lax.scan), and shuffle in the Loader; a loss that "
                "compares all examples with each other needs this.",
            )

    def _is_summed_rows(self, operation: Operation) -> bool:
        """Whether an all-reduce brings rows together: each device adds those it has."""
        own = self._rows // math.prod(self._sizes[axis] for axis in self._batch_axes)
        return (
            operation.kind == "all-reduce"
            and operation.start.op_name.endswith("/gather")
            and any(shape.dims[:1] > (own,) for shape in operation.shapes)
        )

    def _global_batch(
        self, operation: Operation, paths: tuple[str, ...]
    ) -> Iterator[Finding]:
        axes = self._batch_axes
        found = operation.start.attribute("dimensions")
        if paths or not axes or found is None:
            return
        if not axes <= {*(operation.axes(self._sizes) or ())}:
            return
        dim = int(re.findall(r"\d+", found)[0])
        for shape in operation.shapes:
            rows = shape.dims[dim]
            if math.prod(shape.dims) in self._array_sizes or rows not in self._row_counts:
                continue
            if shape.bytes >= SMALL or self._is_scanned(operation, rows):
                yield Finding(
                    "global-batch",
                    None,
                    self._causes.line(operation),
                    f"{shape}, computed from the whole batch, is gathered on every device, "
                    f"over {comma_list(sorted(axes))}: it grows with the number of "
                    "devices. Use each example's own rows only (jax.vmap in place of a "
                    "loop over examples), or keep them split with eqxshard.constrain; a "
                    "loss that compares all examples with each other needs this.",
                )

    def _gathered(
        self, operation: Operation, leaf: Argument, by_layer: set[str]
    ) -> Iterator[Finding]:
        count = max(math.prod(shape.dims) for shape in operation.shapes)
        if count == self._in_use(leaf) and len(leaf.shape) > 1:
            if self._is_scanned(operation, leaf.shape[0]):
                yield Finding(
                    "all-layers",
                    leaf.path,
                    self._line_of_use(operation),
                    f"{leaf.path} {leaf.shape} is gathered for all {leaf.shape[0]} layers "
                    "at once, before the loop over them. Use eqxshard.scan_layers instead "
                    "of jax.lax.scan, and a rule that does not split the dim of layers.",
                )
                return
            if leaf.path in by_layer and not operation.in_loop:
                yield Finding(
                    "whole-parameter",
                    leaf.path,
                    self._line_of_use(operation),
                    f"all layers of {leaf.path} {leaf.shape} are gathered outside of the "
                    "loop that gathers them one by one. Use them inside the layer, and "
                    "return what you need of them.",
                )
                return
        axes = {*(operation.axes(self._sizes) or ())} - {*BATCH_AXES}
        undone = sorted(axes & {*_axes(leaf.spec)})
        whole = (math.prod(leaf.shape), math.prod(leaf.shape[1:]))
        if undone and count in whole:
            yield Finding(
                "whole-parameter",
                leaf.path,
                self._line_of_use(operation),
                f"{leaf.path} {leaf.shape} is split over {comma_list(undone)} and gathered "
                "whole where it is used. Split the dim that the computation can keep "
                "split, or leave it whole over that axis.",
            )

    def _line_of_use(self, operation: Operation) -> str | None:
        """The user's line that first needs what is gathered; a step gathers by itself."""
        own = self._causes.line(operation)
        queue, seen = [operation.result], set[str]()
        for _ in range(_DEEPEST):
            users = [user for value in queue for user in self._users(value)]
            queue = [user for user in users if user.name not in seen]
            seen |= {user.name for user in queue}
            for user in queue:
                line = self._causes.line_of(user)
                if line not in (None, own):
                    return line
        return own

    def _one_layer(self, operation: Operation, leaf: Argument) -> bool:
        """Whether it gathers one layer of stacked layers, in their loop."""
        if not operation.in_loop or len(leaf.shape) < 2:
            return False
        counts = {math.prod(shape.dims) for shape in operation.shapes}
        return self._in_use(leaf) // leaf.shape[0] in counts

    def _in_use(self, leaf: Argument) -> int:
        """The elements of an array as it is used: whole along the batch's axes."""
        parts = (self._sizes[axis] for axis in _axes(leaf.spec) if axis not in BATCH_AXES)
        return math.prod(leaf.shape) // math.prod(parts)

    def _sizes_of_arrays(self) -> set[int]:
        """How many elements arrays have, or one layer of them, in any part of a step."""
        found = set()
        for leaf in self._arguments:
            whole, used = math.prod(leaf.shape), self._in_use(leaf)
            layers = leaf.shape[0] if leaf.shape else 1
            found |= {n // m for n in (whole, used) for m in {1, layers or 1}}
        return found

    def _is_scanned(self, operation: Operation, layers: int) -> bool:
        """Whether a loop takes one layer of the result in each iteration."""
        found: list[tuple[Instruction, int]] = []
        queue, seen = [operation.result], set[str]()
        while queue:
            value = queue.pop()
            for user in self._users(value):
                if user.opcode == "tuple":
                    number = user.operands.index(value.name)
                    found += [(loop, number) for loop in self._loops(user)]
                elif user.opcode in _PASS and user.name not in seen:
                    seen.add(user.name)
                    queue.append(user)
        return any(
            self._module.trips(loop) == layers and self._is_sliced(loop, number)
            for loop, number in found
        )

    def _loops(self, values: Instruction) -> Iterator[Instruction]:
        """The loops over a tuple; compilers for CPUs put small ones in a call."""
        for user in self._users(values):
            if user.opcode == "while":
                yield user
            elif user.opcode == "call":
                inside = self._module.computations[next(user.called())[1]]
                for parameter in (x for x in inside if x.opcode == "parameter"):
                    yield from self._loops(parameter)

    def _is_sliced(self, loop: Instruction, number: int) -> bool:
        """Whether the body of a loop takes slices of one of its values."""
        body = self._module.computations.get(dict(loop.called()).get("body", ""), ())
        values = [
            x
            for x in body
            if x.opcode == "get-tuple-element" and x.attribute("index") == str(number)
        ]
        users = [(value, user) for value in values for user in self._users(value)]
        uses = [(v, u) for v, u in users if u.opcode != "tuple"]
        return bool(uses) and all(self._takes_slice(user, value) for value, user in uses)

    def _takes_slice(self, user: Instruction, value: Instruction) -> bool:
        if user.opcode == "dynamic-slice":
            return user.shapes[0].dims[:1] == (1,)
        if user.opcode in VIEWS:
            uses = self._users(user)
            return bool(uses) and all(self._takes_slice(x, user) for x in uses)
        if user.opcode not in ("fusion", "call"):
            return False
        number = str(user.operands.index(value.name))
        inside = self._module.computations.get(next((n for _, n in user.called()), ""), ())
        parameters = [x for x in inside if x.opcode == "parameter" and x.content == number]
        uses = [(x, u) for x in parameters for u in self._users(x)]
        return bool(uses) and all(self._takes_slice(u, x) for x, u in uses)

    def _users(self, value: Instruction) -> list[Instruction]:
        return self._module.users.get((value.computation, value.name), [])

    def _donation(self) -> Iterator[Finding]:
        head = self._module.text.partition("\n")[0]
        reused = {int(number) for number in _ALIAS.findall(head)}
        if not reused:  # This backend reuses nothing, or does not say so.
            return
        for instruction in self._module.computations.get(self._module.entry, ()):
            found = _ARGUMENT.match(instruction.op_name)
            if instruction.opcode != "parameter" or found is None:
                continue
            leaf = self._arguments[int(found[1])]
            if (
                leaf.donated
                and leaf.bytes >= SMALL
                and int(instruction.content) not in reused
            ):
                yield Finding(
                    "donation",
                    leaf.path,
                    None,
                    f"{leaf.path} {leaf.shape} is donated, and its memory is not reused: "
                    "the new array has another dtype, shape or sharding. Keep them the "
                    "same in the optimizer's update and in the model's state.",
                )

    def _rematerialization(self, stderr: str) -> Iterator[Finding]:
        for _, type_, rest in _REMATERIALIZED.findall(stderr):
            shapes = parse_shapes(type_)
            if sum(shape.bytes for shape in shapes) < SMALL or "shard_map" in rest:
                continue
            instruction = Instruction("", "", type_, "", "", rest)
            yield Finding(
                "rematerialization",
                None,
                self._causes.line_of(instruction),
                f"XLA makes {shapes[0]} whole on every device to get from one sharding to "
                f"another, in {instruction.op_name or 'an operation without a name'}. Fix "
                "the sharding before and after it with eqxshard.constrain, or split "
                "another dim of the parameter there.",
            )


def _axes(spec: Sequence[object]) -> Sequence[str]:
    return [axis for entry in spec for axis in axes_of(entry)]


def _row_counts(rows: Sequence[tuple[int, ...]], microbatches: int) -> set[int]:
    """Sizes of a dim of all examples, or of the tokens of all examples."""
    found = set()
    for count, *more in rows:
        count //= microbatches
        for size in more[:1]:
            found |= {count * size, count * (size - 1)}
        found.add(count)
    return found
