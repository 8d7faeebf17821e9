"""What a compiled step sends between devices."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from ._table import rendered

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# An instruction: `%name = type kind(operands), attributes`. Of an asynchronous one the
# `-done` half counts, whose type is that of the result.
_INSTRUCTION = re.compile(
    rf'\s+(?:ROOT )?%?\S+ = ([^%"]*?) ({"|".join(KINDS)})(?:-done)?\('
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|\w+_computations?)=(?:%([\w.-]+)|\{(%[^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled function.

    - `kind`: such as `all-gather`.
    - `shapes`: of its results on each device, such as `f32[64,64]`: several if the
        compiler combined several operations in one.
    - `bytes`: of these results.
    - `times`: how often it runs in a call: more than once in the body of a loop, `None`
        if the compiled text does not say how often the loop does.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    times: int | None


@dataclass(frozen=True)
class Collectives:
    """The collective operations of a compiled function: `print` it.

    - `ops`: one [`eqxshard.testing.Collective`][] for each operation in the compiled
        text; one in the body of a loop is there once.
    """

    ops: tuple[Collective, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many operations there are, by kind."""
        return {kind: len(ops) for kind, ops in self._by_kind().items()}

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of their results on each device, by kind, each operation once."""
        return {kind: sum(op.bytes for op in ops) for kind, ops in self._by_kind().items()}

    @property
    def times(self) -> dict[str, int | None]:
        """How many operations a call runs, by kind; `None` if a loop hides it."""
        known = {
            kind: [op.times for op in ops if op.times is not None]
            for kind, ops in self._by_kind().items()
        }
        counts = self.counts
        return {k: sum(x) if len(x) == counts[k] else None for k, x in known.items()}

    def _by_kind(self) -> dict[str, list[Collective]]:
        found = {kind: [op for op in self.ops if op.kind == kind] for kind in KINDS}
        return {kind: ops for kind, ops in found.items() if ops}

    def __str__(self) -> str:
        if not self.ops:
            return "no collectives"
        rows: dict[Collective, int] = {}
        for op in sorted(self.ops, key=lambda op: (KINDS.index(op.kind), -op.bytes)):
            rows[op] = rows.get(op, 0) + 1
        table = Table("kind")
        for column in ("count", "times per call", "bytes"):
            table.add_column(column, justify="right")
        table.add_column("shapes", overflow="fold")
        for op, count in rows.items():
            times = "?" if op.times is None else str(count * op.times)
            size = f"{count * op.bytes:,}"
            table.add_row(op.kind, str(count), times, size, " ".join(op.shapes))
        return rendered(table)


def collectives(step: Any, /, *args: Any) -> Collectives:
    """Count what a compiled function sends between devices.

    The platform matters: XLA on CPU, for one, has all-reduces where a GPU has
    reduce-scatters.

    **Arguments:**

    - `step`: a train step, a function of [`eqxshard.filter_jit`][] or `jax.jit`, or
        anything else with a method `lower`; or a `jax.stages.Compiled`, to compile once
        for several checks.
    - `args`: what to lower it for; nothing for what is compiled.

    **Returns:**

    An [`eqxshard.testing.Collectives`][], which prints as a table. An asynchronous pair
    (`all-gather-start`, `all-gather-done`) is one operation, and so is a combined one
    with several results. An operation in the body of a loop is counted once in
    `counts` and `bytes`, and as often as the loop runs in `times`.

    !!! Example

        ```python
        print(eqxshard.testing.collectives(train_step, state, batch))
        ```
    """
    if not isinstance(step, jax.stages.Compiled):
        step = step.lower(*args).compile()
    return Collectives(tuple(_parse(step.as_text() or "")))


def assert_collectives(
    step: Any,
    /,
    *args: Any,
    at_most: Mapping[str, int] | None = None,
    exactly: Mapping[str, int] | None = None,
) -> Collectives:
    """Check that a compiled function sends what theory asks for, and nothing else.

    A kind that is named neither in `at_most` nor in `exactly` may not occur.

    **Arguments:**

    - `step`, `args`: as for [`eqxshard.testing.collectives`][].
    - `at_most`: for each kind (`"all-gather"`, `"all-reduce"`, `"reduce-scatter"`,
        `"all-to-all"`, `"ragged-all-to-all"`, `"collective-permute"`,
        `"collective-broadcast"`) the number of operations in the compiled text that are
        allowed. One in the body of a loop counts once.
    - `exactly`: for each kind the number that there must be.

    **Returns:**

    The [`eqxshard.testing.Collectives`][].

    **Raises:**

    `AssertionError` with the whole inventory (kinds, counts, bytes, shapes) if there are
    more, or not exactly so many; `ValueError` if a kind is none of these.

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
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no collective; use one of {', '.join(KINDS)}.")
    found = collectives(step, *args)
    wrong = []
    for kind in KINDS:
        count = found.counts.get(kind, 0)
        if kind in exactly and count != exactly[kind]:
            wrong.append(f"{plural(count, kind)} where there must be {exactly[kind]}")
        elif kind not in exactly and count > at_most.get(kind, 0):
            allowed = at_most.get(kind, 0)
            limit = f"at most {allowed} may be" if allowed else "none may be"
            wrong.append(f"{plural(count, kind)} where {limit}")
    if wrong:
        raise AssertionError(
            f"the compiled function has {'; '.join(wrong)}. Its collectives:\n{found}\n"
            "Look at the shapes: those of a weight mean that it is gathered more often "
            "than once, or that its gradient is; those with the batch's rows mean that "
            "activations move, which eqxshard.constrain can keep in place."
        )
    return found


def plural(count: int, kind: str) -> str:
    """Such as `1 all-gather`, `2 all-gathers`."""
    return f"{count:,} {kind}" + ("" if abs(count) == 1 else "s")


def _parse(text: str) -> Iterator[Collective]:
    """The collectives of a compiled module, from its text."""
    entry, here = "", ""
    found: list[tuple[str, str, str]] = []
    # Each computation's callers, and how often one run of the caller runs it.
    callers: dict[str, list[tuple[str, int | None]]] = {}
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            here = header[2]
            entry = here if header[1] else entry
            continue
        if instruction := _INSTRUCTION.match(line):
            found.append((here, instruction[2], instruction[1]))
        for attribute, one, several in _CALLED.findall(line):
            factor: int | None = 1
            if attribute in ("body", "condition"):
                trips = _TRIPS.search(line)
                factor = int(trips[1]) if trips else None
            for name in [one] if one else re.findall(r"%([\w.-]+)", several):
                callers.setdefault(name, []).append((here, factor))

    @functools.cache
    def runs(computation: str) -> int | None:
        if computation == entry:
            return 1
        total = 0
        for caller, factor in callers.get(computation, []):
            outer = runs(caller)
            if outer is None or factor is None:
                return None
            total += outer * factor
        return total

    for computation, kind, result in found:
        shapes = _SHAPE.findall(result)
        yield Collective(
            kind=kind,
            shapes=tuple(f"{dtype}[{dims}]" for dtype, dims in shapes),
            bytes=sum(_size(dtype, dims) for dtype, dims in shapes),
            times=runs(computation),
        )


def _size(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    count = math.prod(int(n) for n in re.findall(r"\d+", dims))
    # `pred` has a byte for each, and `token` has no elements.
    each = int(bits[0]) if bits else 8 * (dtype == "pred")
    return -(-count * each // 8)
