"""The collectives in the text of a compiled module."""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# An instruction: `%name = type kind(operands), attributes`. Of an asynchronous pair, the
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


class Operation(NamedTuple):
    """A collective in a compiled module.

    - `kind`: such as `all-gather`.
    - `shapes`: of its results on each device, such as `f32[64,64]`.
    - `bytes`: of these results.
    - `times`: how often one call of the module runs it; `None` if the text does not say.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    times: int | None


def find_collectives(text: str) -> Iterator[Operation]:
    """The collectives of a compiled module, from its text."""
    entry, here = "", ""
    found: list[tuple[str, str, str]] = []
    # The callers of each computation, and how often one run of the caller runs it.
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
        yield Operation(
            kind=kind,
            shapes=tuple(f"{dtype}[{dims}]" for dtype, dims in shapes),
            bytes=sum(_bytes(dtype, dims) for dtype, dims in shapes),
            times=runs(computation),
        )


def _bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    count = math.prod(int(n) for n in re.findall(r"\d+", dims))
    # `pred` has a byte for each element, and `token` has no elements.
    each = int(bits[0]) if bits else 8 * (dtype == "pred")
    return -(-count * each // 8)
