"""Programs that also return, for each of their values, which rows are NaN or infinite.

`Recorder` evaluates a jaxpr one operation at a time and records all of its values; a loop
over layers or microbatches stays a loop. From what it recorded, `follow` finds on the host
the operation that a value got its NaN or infinity from.
"""

import contextlib
import dataclasses
import functools as ft
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, UInt8

from .._jax import Literal, frames_of, mesh_of
from ..compiled._causes import user_frame
from ..compiled._hlo import Frame
from ..sharding._explicit import auto_mesh, is_explicit, to_auto
from ..sharding._leaves import is_inexact
from ..training.rewrite._jaxprs import (
    consts_of,
    evaluate_equation,
    is_jaxpr,
    open_jaxpr,
    scan_counts,
)

#: The kinds of values: some elements are NaN, some are infinite, or all are finite.
NAN, INFINITE, FINITE = 2, 1, 0
#: Operations that only call the jaxpr inside them.
_CALLS = ("jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
_REMAT = ("checkpoint", "remat", "remat2")
#: Operations that only move values, or change their sign.
_MOVES = ("broadcast_in_dim", "copy", "expand_dims", "neg", "optimization_barrier")
_MOVES += ("reshape", "reshard", "rev", "sharding_constraint", "squeeze", "transpose")


@dataclass(frozen=True)
class Origin:
    """The operation that made NaN or infinity of finite values, or the input that had it.

    - `order`: its place in the order of evaluation.
    - `kind`: `NAN` or `INFINITE`.
    - `is_given`: true for an input, and for a literal such as the -inf of a mask.
    - `name`: the name of the operation, or of the input.
    - `frame`: the user's line; `None` for an input, or where no line is known.
    - `rows`: the rows of the value that are not finite, if it has a row for each example.
    - `rounds`: the numbers of the rounds of the loops around the operation.
    """

    order: int
    kind: int
    is_given: bool
    name: str
    frame: Frame | None = None
    rows: tuple[int, ...] | None = None
    rounds: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Loop:
    """A `scan`: its body, and how values in the body belong to values around it.

    The per-device code of a `shard_map` counts as a loop of one round.
    """

    body: "Recorder"
    inputs: Sequence[int | None]
    outputs: Sequence[int | None]
    record: int
    length: int
    consts: int
    carry: int
    is_reversed: bool


@dataclass(frozen=True)
class _Operation:
    """An operation, with the numbers of its inputs and outputs.

    The number of a value that cannot be NaN is `None`, that of a literal minus its kind.
    """

    name: str
    frame: Frame | None
    inputs: Sequence[int | None]
    outputs: Sequence[int | None]
    loop: _Loop | None = None


class Recorder:
    """Evaluates a jaxpr, and records the kinds of its values.

    **Arguments:**

    - `rows`: the number of examples. A value with as many rows is recorded row by row.
    - `microbatches`: the number of microbatches, which is the length of the outermost loop.
    - `losses`: the name of the examples' losses, from `checkpoint_name`.
    """

    def __init__(self, rows: int, microbatches: int, losses: str):
        self._rows = rows
        self._microbatches = microbatches
        self._losses = losses
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._operations: list[_Operation] = []
        self._records: list[Array] = []
        self._sizes: list[int] = []
        #: The number of the value of the losses, once it is known.
        self.losses: int | None = None

    def record(self, value: Any) -> int | None:
        """Record a value, such as an input; returns its number if it can be NaN."""
        if not is_inexact(value) or not value.size:
            return None
        has_rows = value.ndim and value.shape[0] == self._rows
        with _on_auto():
            value = to_auto(value)
            if value.dtype.itemsize == 1:
                value = value.astype(jnp.float32)
            size = abs(value).reshape((self._rows if has_rows else 1, -1))
            infinite = (size == jnp.inf).astype(jnp.uint8) * np.uint8(INFINITE)
            kind = jnp.where(size != size, np.uint8(NAN), infinite)
            return self._add(jax.lax.reduce(kind, np.uint8(FINITE), jax.lax.max, (1,)))

    def records(self) -> UInt8[Array, " n"]:
        """All records in one array, to return it to the host."""
        with _on_auto():
            found = jnp.concatenate([jnp.zeros(0, jnp.uint8), *self._records])
        if not is_explicit(jax.sharding.get_abstract_mesh()):
            return found
        # The loop or per-device code that returns this is on Explicit axes.
        return jax.sharding.reshard(found, PartitionSpec(None))

    def _add(self, kinds: Array) -> int:
        with _on_auto():
            self._records.append(to_auto(kinds).ravel())
        self._sizes.append(kinds.size)
        return len(self._sizes) - 1

    def evaluate(
        self,
        jaxpr: Any,
        inputs: Sequence[Any],
        numbers: Sequence[int | None],
        caller: Frame | None = None,
    ) -> tuple[list[Any], list[int | None]]:
        """The results of a jaxpr, and their numbers.

        **Arguments:**

        - `jaxpr`: a closed or an open jaxpr.
        - `inputs`, `numbers`: its inputs, and the numbers that `record` gave them.
        - `caller`: the line that calls it, for operations without a line of the user's.
        """
        constants = [*consts_of(jaxpr)]
        jaxpr = open_jaxpr(jaxpr)
        values: dict[Any, tuple[Any, int | None]] = {}
        given = [*map(self.record, map(jnp.asarray, constants)), *numbers]
        names = [*jaxpr.constvars, *jaxpr.invars]
        values.update(zip(names, zip([*constants, *inputs], given), strict=True))

        def read(atom: Any) -> tuple[Any, int | None]:
            if isinstance(atom, Literal):
                return atom.val, -_kind_of(atom.val) or None
            return values[atom]

        for eqn in jaxpr.eqns:
            read_all = [read(atom) for atom in eqn.invars]
            found = [x for x, _ in read_all], [number for _, number in read_all]
            with _axes_of(eqn):
                outputs = self._evaluate_one(eqn, *found, caller)
            values.update(zip(eqn.outvars, zip(*outputs), strict=True))
        results = [read(atom) for atom in jaxpr.outvars]
        return [x for x, _ in results], [number for _, number in results]

    def _evaluate_one(
        self, eqn: Any, inputs: list[Any], numbers: list[int | None], caller: Frame | None
    ) -> tuple[list[Any], list[int | None]]:
        name, frame = eqn.primitive.name, _frame(eqn) or caller
        inside = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
        if name in (*_CALLS, *_REMAT) and is_jaxpr(inside):
            if name in _REMAT and eqn.params["prevent_cse"]:
                # Otherwise the compiler would keep the values, not compute them again.
                inputs = [*jax.lax.optimization_barrier(inputs)]
            return self.evaluate(inside, inputs, numbers, frame)
        loop = None
        if name == "scan":
            outputs, loop = self._scan(eqn, inputs, frame)
        elif name == "shard_map":
            outputs, loop = self._shard_map(eqn, inputs, frame)
        else:
            outputs = evaluate_equation(eqn, inputs)
        if name in _MOVES:
            return outputs, numbers[: len(outputs)]
        found = [*map(self.record, outputs)]
        if name == "name" and eqn.params["name"] == self._losses:
            (self.losses,) = found
        self._operations.append(_Operation(name, frame, numbers, found, loop))
        return outputs, found

    def _scan(
        self, eqn: Any, inputs: list[Any], frame: Frame | None
    ) -> tuple[list[Any], _Loop]:
        consts, carry = scan_counts(eqn)
        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        rows, count = self._rows, self._microbatches
        if count > 1 and options["length"] == count:
            rows, count = rows // count, 1
        body, places = Recorder(rows, count, self._losses), []

        def step(state: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[Any, Array]]:
            body.clear()  # JAX may trace this more than once.
            given = [*inputs[:consts], *state, *xs]
            numbers = [*map(body.record, given)]
            out, found = body.evaluate(eqn.params["jaxpr"], given, numbers, frame)
            places[:] = [numbers, found]
            return out[:carry], (out[carry:], body.records())

        first, xs = inputs[consts : consts + carry], inputs[consts + carry :]
        state, (ys, records) = jax.lax.scan(step, first, xs, **options)
        record, (numbers, found) = self._add(records), places
        length, is_reversed = options["length"], options["reverse"]
        loop = _Loop(body, numbers, found, record, length, consts, carry, is_reversed)
        return [*state, *ys], loop

    def _shard_map(
        self, eqn: Any, inputs: list[Any], frame: Frame | None
    ) -> tuple[list[Any], _Loop]:
        params = eqn.params
        manual = params.get("newly_manual_axes", params.get("manual_axes"))
        axes = tuple(axis for axis in params["mesh"].axis_names if axis in manual)
        # The rows of a device are not those of the batch.
        body, places = Recorder(-1, 1, self._losses), []

        def on_device(*given: Any) -> tuple[list[Any], Array]:
            body.clear()
            numbers = [*map(body.record, given)]
            out, found = body.evaluate(params["jaxpr"], given, numbers, frame)
            places[:] = [numbers, found]
            return out, body.records()[None]

        outputs, records = jax.shard_map(
            on_device,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=([*params["out_specs"]], PartitionSpec(axes)),
            axis_names={*manual},
            check_vma=params["check_vma"],
        )(*inputs)
        record, (numbers, found) = self._add(records.max(axis=0)), places
        loop = _Loop(body, numbers, found, record, 1, len(inputs), 0, is_reversed=False)
        return outputs, loop

    # On the host.

    def kinds(self, records: np.ndarray, number: int) -> np.ndarray:
        """The kind of each row of a value, or the one kind of the whole value."""
        start = self._starts[number]
        return records[start : start + self._sizes[number]]

    @ft.cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(self._sizes)]

    def losses_by_round(self, records: np.ndarray) -> list[np.ndarray]:
        """The kinds of the examples' losses, for each microbatch."""
        if self.losses is not None:
            return [self.kinds(records, self.losses)]
        loops = [each.loop for each in self._operations if each.loop is not None]
        for loop in loops:
            if loop.body.losses is not None:
                table = self._by_round(records, loop)
                return [loop.body.kinds(row, loop.body.losses) for row in table]
        return []

    def _by_round(self, records: np.ndarray, loop: _Loop) -> np.ndarray:
        """The records of a loop's body, with a row for each round."""
        found = self.kinds(records, loop.record)
        return found.reshape(loop.length, found.size // max(loop.length, 1))

    def follow(
        self,
        records: np.ndarray,
        origins: dict[int, Origin],
        order: Iterator[int],
        rounds: tuple[int, ...] = (),
    ) -> None:
        """Find where each value got its NaN or infinity from.

        **Arguments:**

        - `records`: the result of the method `records`, on the host.
        - `origins`: the origins of the inputs, by number; those of other values are added.
        - `order`: counts operations.
        - `rounds`: the rounds of the loops around.
        """
        for operation in self._operations:
            name, frame = operation.name, operation.frame
            made = Origin(next(order), NAN, False, name, frame, rounds=rounds)
            if operation.loop is not None:
                self._follow_loop(operation, operation.loop, records, origins, order, made)
                continue
            sources = [
                (kind, _source(number, origins, made))
                for number in operation.inputs
                if number is not None and (kind := self._kind(records, number))
            ]
            for number in operation.outputs:
                if number is not None and (kind := self._kind(records, number)):
                    rows = self._bad_rows(records, number)
                    here = dataclasses.replace(made, kind=kind, rows=rows)
                    origins[number] = _origin(kind, sources, here)

    def _kind(self, records: np.ndarray, number: int) -> int:
        """The worst kind in a value."""
        if number < 0:
            return -number
        return int(self.kinds(records, number).max(initial=FINITE))

    def _bad_rows(self, records: np.ndarray, number: int) -> tuple[int, ...] | None:
        kinds = self.kinds(records, number)
        return tuple(map(int, np.flatnonzero(kinds))) if kinds.size == self._rows else None

    def _follow_loop(
        self,
        operation: _Operation,
        loop: _Loop,
        records: np.ndarray,
        origins: dict[int, Origin],
        order: Iterator[int],
        made: Origin,
    ) -> None:
        given = [_source(number, origins, made) for number in operation.inputs]
        carried = given[loop.consts : loop.consts + loop.carry]
        # A loop of no rounds returns its carry unchanged.
        found = {} if loop.length else dict(enumerate(carried))
        table, numbers = self._by_round(records, loop), range(loop.length)
        for i in reversed(numbers) if loop.is_reversed else numbers:
            inside = {
                number: origin
                for number, origin in zip(loop.inputs, given)
                if number is not None and loop.body._kind(table[i], number)
            }
            number_of_round = () if operation.name == "shard_map" else (i,)
            loop.body.follow(table[i], inside, order, made.rounds + number_of_round)
            out = [_source(number, inside, made) for number in loop.outputs]
            given[loop.consts : loop.consts + loop.carry] = out[: loop.carry]
            for k, number in enumerate(loop.outputs):
                is_carried = k < loop.carry
                if number in inside and (is_carried or k not in found):
                    found[k] = out[k]
        for k, number in enumerate(operation.outputs):
            if number is not None and (kind := self._kind(records, number)):
                here = dataclasses.replace(made, kind=kind)
                origins[number] = found.get(k, here)


def _source(number: int | None, origins: dict[int, Origin], made: Origin) -> Origin:
    """The origin of an input; for a literal, the operation that takes it."""
    if number is None:
        return made
    if number < 0:
        return dataclasses.replace(made, kind=-number, is_given=True)
    return origins.get(number, made)


def earliest(origins: Sequence[Origin]) -> Origin:
    """The first of some origins, in the order of evaluation."""
    return min(origins, key=lambda origin: origin.order)


def _origin(kind: int, sources: Sequence[tuple[int, Origin]], made: Origin) -> Origin:
    """The origin of an operation's output; `made` if it is the operation itself.

    An infinity that was given, for example by a mask, is intended. It is the origin of
    other infinities, but not of a NaN.
    """
    if from_nan := [origin for source, origin in sources if source == NAN]:
        return earliest(from_nan)
    infinite = [origin for _, origin in sources]
    if computed := [origin for origin in infinite if not origin.is_given]:
        return earliest(computed)
    return made if kind == NAN or not infinite else earliest(infinite)


def _on_auto() -> Any:
    """A context in which no axes are Explicit."""
    mesh = jax.sharding.get_abstract_mesh()
    if not is_explicit(mesh):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(auto_mesh(mesh))


def _axes_of(eqn: Any) -> Any:
    """A context with the axes on which an equation was traced, if some are Explicit."""
    mesh = mesh_of(eqn)
    if not (is_explicit(mesh) or is_explicit(jax.sharding.get_abstract_mesh())):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def _kind_of(literal: Any) -> int:
    if not is_inexact(np.asarray(literal)):
        return FINITE
    value = np.asarray(literal, np.complex128)
    if np.isnan(value).any():
        return NAN
    return INFINITE if np.isinf(value).any() else FINITE


def _frame(eqn: Any) -> Frame | None:
    """The user's line that an equation comes from.

    Inside a function under `jax.jit`, JAX keeps no frames of its callers.
    """
    frames = frames_of(eqn)
    return user_frame(Frame(x.file_name, x.line_num, x.function_name) for x in frames)
