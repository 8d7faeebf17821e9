"""Collectives: the communication of a compiled step."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from rich.table import Table

from .._errors import UsageError
from ..compiled._communication import COLLECTIVES, Collective, find_collectives
from ..compiled._hlo import parse_module
from ..inspect._tables import render
from ..sharding._text import comma_list


class Collectives(tuple[Collective, ...]):
    """The collective operations of a compiled function: `print` it.

    It is a tuple, as `plan.collectives` is: one [`eqxshard.testing.Collective`][] for each
    operation in the compiled text. An operation in the body of a loop is listed once.
    """

    @property
    def counts(self) -> dict[str, int]:
        """The number of operations in the compiled text, by kind."""
        return {kind: len(ops) for kind, ops in self._by_kind().items()}

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of their results on each device, by kind; loops count once."""
        return {kind: sum(op.bytes for op in ops) for kind, ops in self._by_kind().items()}

    @property
    def times(self) -> dict[str, int | None]:
        """The number of operations that a call runs, by kind; `None` if not known."""
        times: dict[str, int | None] = {}
        for kind, ops in self._by_kind().items():
            known = [op.times for op in ops if op.times is not None]
            times[kind] = sum(known) if len(known) == len(ops) else None
        return times

    def _by_kind(self) -> dict[str, list[Collective]]:
        found: dict[str, list[Collective]] = {}
        for op in sorted(self, key=lambda op: COLLECTIVES.index(op.kind)):
            found.setdefault(op.kind, []).append(op)
        return found

    def __str__(self) -> str:
        if not self:
            return "no collectives"
        rows = Counter(sorted(self, key=lambda op: (COLLECTIVES.index(op.kind), -op.bytes)))
        table = Table("kind", "axes")
        for column in ("count", "times per call", "bytes"):
            table.add_column(column, justify="right")
        table.add_column("shapes", overflow="fold")
        for op, count in rows.items():
            times = "?" if op.times is None else str(count * op.times)
            size = f"{count * op.bytes:,}"
            axes = "?" if op.axes is None else ", ".join(op.axes)
            table.add_row(op.kind, axes, str(count), times, size, " ".join(op.shapes))
        return render(table)

    __repr__ = __str__  # A notebook shows it.


def collectives(step: Any, /, *args: Any) -> Collectives:
    """The collectives of a compiled function.

    They depend on the platform: on CPUs, for example, XLA uses all-reduces where it uses
    reduce-scatters on GPUs.

    **Arguments:**

    - `step`: a train step, a function from [`eqxshard.filter_jit`][] or `jax.jit`, or
        anything else with a method `lower`; or a `jax.stages.Compiled`, to compile once
        for several checks.
    - `args`: the arguments to lower it for; none if it is compiled already.

    **Returns:**

    An [`eqxshard.testing.Collectives`][], which prints as a table. An asynchronous pair
    (`all-gather-start`, `all-gather-done`) is one operation, and so is a combined one
    with several results. An operation in the body of a loop counts once in `counts` and
    `bytes`, and once per iteration in `times`.

    !!! Example

        ```python
        print(eqxshard.testing.collectives(train_step, state, batch))
        ```
    """
    if not isinstance(step, jax.stages.Compiled):
        step = step.lower(*args).compile()
    mesh = _mesh_of(step)
    sizes = {} if mesh is None else dict(mesh.shape)
    found = find_collectives(parse_module(step.as_text() or ""), math.prod(sizes.values()))
    return Collectives(operation.describe(sizes) for operation in found)


def _mesh_of(compiled: Any) -> Mesh | None:
    """The mesh that the arguments or results of a compiled function are on."""
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, Mesh):
            return mesh
    return None


def assert_collectives(
    step: Any,
    /,
    *args: Any,
    at_most: Mapping[str, int] | None = None,
    exactly: Mapping[str, int] | None = None,
) -> Collectives:
    """Check that a compiled function has the expected collectives, and no others.

    A kind that is named neither in `at_most` nor in `exactly` must not occur.

    **Arguments:**

    - `step`, `args`: as for [`eqxshard.testing.collectives`][].
    - `at_most`: for each kind (`"all-gather"`, `"all-reduce"`, `"reduce-scatter"`,
        `"all-to-all"`, `"ragged-all-to-all"`, `"collective-permute"`,
        `"collective-broadcast"`) the largest number of operations in the compiled text.
        An operation in the body of a loop counts once.
    - `exactly`: for each kind the exact number.

    **Returns:**

    The [`eqxshard.testing.Collectives`][].

    **Raises:**

    `AssertionError` with the whole inventory (kinds, counts, bytes, shapes) if there are
    too many, or not the exact number; `ValueError` if a kind is not one of these.

    !!! Example

        ```python
        # An MLP of three layers under FSDP: each weight is gathered once.
        assert_collectives(
            train_step, state, batch, at_most={"all-gather": 3, "all-reduce": 4}
        )
        ```
    """
    at_most, exactly = at_most or {}, exactly or {}
    for kind in (*at_most, *exactly):
        if kind not in COLLECTIVES:
            raise UsageError(
                f"{kind!r} is not a kind of collective; use one of "
                f"{comma_list(COLLECTIVES)}."
            )
    found = collectives(step, *args)
    wrong = []
    for kind in COLLECTIVES:
        count = found.counts.get(kind, 0)
        if kind in exactly and count != exactly[kind]:
            wrong.append(f"{count} {kind} instead of exactly {exactly[kind]}")
        elif kind not in exactly and count > at_most.get(kind, 0):
            wrong.append(f"{count} {kind} instead of at most {at_most.get(kind, 0)}")
    if wrong:
        raise AssertionError(
            f"the compiled function has {'; '.join(wrong)}. Its collectives:\n{found}\n"
            "Look at the shapes: the shape of a weight means that it, or its gradient, is "
            "gathered more than once; a shape with the batch's rows means that activations "
            "are sent, which eqxshard.constrain can prevent."
        )
    return found
