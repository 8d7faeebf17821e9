"""Lint of the text of a compiled step: gathers of the batch, and memory not reused.

A collective in the user's own per-device code is not a finding. Neither is anything that
the text does not say for certain.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..sharding._mesh import batch_axes
from ..sharding._text import comma_list
from ._causes import Causes
from ._communication import Operation, find_collectives
from ._findings import REWRITTEN, Finding
from ._hlo import Instruction, Module

_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
#: How many instructions to go back for the name of an operation.
_DEEPEST = 6
#: XLA may gather results of fewer bytes from the batch, because that costs less than
#: computing with parts of them.
_SMALL = 2**16


class Argument(NamedTuple):
    """An array that a step takes.

    - `name`: its name in the text.
    - `path`, `shape`: its path in the state, and the shape of the whole array.
    - `donated`: whether its memory is to be reused.
    - `in_model`: whether it belongs to the model.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    donated: bool
    in_model: bool


class LintedStep(NamedTuple):
    """The facts about a step that lint needs to read its text.

    - `sizes`: the sizes of the axes of the mesh.
    - `arguments`: the arrays that it takes, except for the batch.
    - `batch`: the path and shape of each array of a batch, by its name in the text.
    - `scanned`: the shapes of the arrays of which loops take a part in each iteration.
    - `batch_axes`: the axes that the batch is split over; by default, the axes of the batch
        in our meshes.
    """

    sizes: Mapping[str, int]
    arguments: Sequence[Argument]
    batch: Mapping[str, tuple[str, tuple[int, ...]]]
    scanned: Collection[tuple[int, ...]]
    batch_axes: Collection[str] | None = None


@contextlib.contextmanager
def unread_is_warned(what: str, remedy: str = "") -> Iterator[None]:
    """Warn if lint cannot read a program, which still runs."""
    try:
        yield
    except Exception as error:
        warnings.warn(
            f"lint could not read {what} ({type(error).__name__}: {error}); please report "
            f"this{remedy}.",
            RuntimeWarning,
            # The line that iterates over the generator around this.
            stacklevel=4,
        )


@dataclass
class TextLint:
    """The findings in the text of a step.

    - `module`: the compiled text.
    - `step`: the facts about the step.
    """

    module: Module
    step: LintedStep

    def __post_init__(self):
        sizes, arguments, self._batch, self.scanned, rows = self.step
        self.sizes = sizes
        self._arguments = {each.name: each for each in arguments}
        axes = batch_axes(sizes) if rows is None else rows
        self._batch_axes = {axis for axis in axes if sizes.get(axis, 1) > 1}
        paths = {each.name: each.path for each in arguments if each.in_model}
        self.causes = Causes(self.module, sizes, paths, {}, rows)

    def findings(self) -> list[Finding]:
        """The findings of kinds `global-batch` and `donation`, each once."""
        gathers = self.gathers() if self._batch_axes else ()
        found = [x for each in gathers for x in self._global_batch(each)]
        return [*dict.fromkeys([*found, *self._donation()])]

    def gathers(self) -> Iterator[Operation]:
        """All-gathers from neither the user's per-device code nor a rewrite of ours."""
        devices = math.prod(self.sizes.values())
        for operation in find_collectives(self.module, devices, ["all-gather"]):
            name = operation.start.op_name
            if "shard_map" not in name and REWRITTEN not in name:
                yield operation

    def _global_batch(self, operation: Operation) -> Iterator[Finding]:
        """The findings if it brings a device rows of others, or results from them."""
        over = self._batch_axes.intersection(operation.axes(self.sizes) or ())
        if not over:
            return
        entries, of_model = dict[str, tuple[int, ...]](), False
        for name in self.causes.depends_on(operation):
            if name in self._batch:
                path, shape = self._batch[name]
                entries[path] = shape
            elif name not in self._arguments or self._arguments[name].in_model:
                of_model = True
            if entries and of_model:
                break
        if of_model and not self._gathers_computed(operation):
            return
        what = {path: f"{path} {shape}" for path, shape in sorted(entries.items())}
        if of_model and entries:
            shapes = comma_list(operation.shapes)
            what = {None: f"{shapes}, computed from the whole batch,"}
        uses = (self.causes.frame(operation, of_use=of_use) for of_use in (False, True))
        line = next((frame.place for frame in uses if frame), None)
        for leaf, name in what.items():
            yield Finding(
                "global-batch",
                leaf,
                line,
                f"{name} is gathered: every device gets the rows of all others, over "
                f"{comma_list(sorted(over))}, and may compute with all of "
                "them. Use jax.vmap in place of a loop over examples (jax.lax.map, "
                "jax.lax.scan), shuffle in the Loader, or keep the rows split with "
                "eqxshard.constrain; a loss that compares all examples with each other "
                "needs this.",
            )

    def _gathers_computed(self, operation: Operation) -> bool:
        """True if a forward pass gathers much, or an array that a loop reads row by row.

        Only the forward pass counts: gradients and the optimizer's updates depend on the
        batch, too.
        """
        name = self._op_name(operation.start)
        # In an eval step, nothing is differentiated.
        is_forward = "jvp(" in name or "jvp(" not in self.module.text
        if "transpose(" in name or not is_forward:
            return False
        return any(
            shape.bytes >= _SMALL or shape.dims in self.scanned
            for shape in operation.shapes
        )

    def _op_name(self, value: Instruction) -> str:
        """The place in the program that a value is from.

        XLA's own gathers may not say it, but their operands do.
        """
        for _ in range(_DEEPEST):
            operands = self.module.operands(value)
            if value.op_name or not operands:
                break
            value = operands[0]
        return value.op_name

    def _donation(self) -> Iterator[Finding]:
        head = self.module.text.partition("\n")[0]
        reused = {int(number) for number in _ALIAS.findall(head)}
        if not reused:  # This backend reuses nothing, or does not say so.
            return
        for parameter in self.module.parameters():
            leaf = self._arguments.get(parameter.argument)
            if leaf and leaf.donated and int(parameter.content) not in reused:
                yield Finding(
                    "donation",
                    leaf.path,
                    None,
                    f"{leaf.path} {leaf.shape} is donated, and its memory is not reused: "
                    "the new array has another dtype, shape or sharding. Keep them the "
                    "same in the optimizer's update and in the model's state.",
                )
