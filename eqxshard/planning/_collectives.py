"""The collectives of a planned step, one by one and in groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..compiled._communication import Operation


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of a planned step.

    - `kind`: such as `all-gather`.
    - `axes`: the axes of the mesh that it goes along; `None` if the compiler does not say.
    - `shapes`: of its results on each device.
    - `bytes`: of these results.
    - `sent`: the bytes that each device sends, each time: of an all-gather or a
        reduce-scatter over `n` devices, `(n - 1) / n` of the whole; of an all-reduce
        twice that.
    - `times`: how often a step runs it; `None` if the compiled text does not say.
    - `in_loop`: whether it is in a loop, such as that over layers.
    - `line`: the line of your code that causes it, as `model.py:12`.
    - `function`: the function that this line is in, as `MLP.__call__`.
    - `leaves`: the arrays of the model that it gathers, or whose gradients it reduces. The
        compiler does not say the latter, so arrays of the same shape are named together.
    - `hidden`: the part of its time that passes while the device computes, from 0 to 1;
        `None` if it is not known.
    """

    kind: str
    axes: tuple[str, ...] | None
    shapes: tuple[str, ...]
    bytes: int
    sent: int
    times: int | None
    in_loop: bool
    line: str | None
    function: str | None
    leaves: tuple[str, ...]
    hidden: float | None


def join_axes(axes: Iterable[str] | None) -> str:
    """The axes of a mesh as one word: `data,fsdp`."""
    return "unknown" if axes is None else ",".join(axes)


def has_peers(operation: Operation) -> bool:
    """Whether devices take part together, and not each alone."""
    return operation.groups is None or operation.groups.shape[1] > 1


class CollectiveGroup(NamedTuple):
    """Collectives of a plan that have all in common but their shapes.

    - `sent`: the bytes that each device sends, each time, in all of them.
    - `hidden`: the mean of theirs, by what they send; `None` if it is not known.
    """

    axes: tuple[str, ...] | None
    kind: str
    times: int | None
    in_loop: bool
    leaves: tuple[str, ...]
    line: str | None
    sent: int
    hidden: float | None

    @property
    def sent_in_all(self) -> int:
        """The bytes that each device sends in a step."""
        return self.sent * (1 if self.times is None else self.times)


def group_collectives(
    collectives: tuple[PlannedCollective, ...],
) -> list[CollectiveGroup]:
    """Collectives in groups, those that send the most first."""
    groups: dict[tuple[Any, ...], list[PlannedCollective]] = {}
    for each in collectives:
        key = (each.axes, each.kind, each.times, each.in_loop, each.leaves, each.line)
        groups.setdefault(key, []).append(each)
    found = []
    for key, group in groups.items():
        known = [(x.sent, x.hidden) for x in group if x.hidden is not None]
        total = sum(sent for sent, _ in known)
        hidden = sum(sent * part for sent, part in known) / total if total else None
        sent = sum(each.sent for each in group)
        found.append(CollectiveGroup(*key, sent=sent, hidden=hidden))
    return sorted(found, key=lambda each: -each.sent_in_all)
