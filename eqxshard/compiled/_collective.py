"""A collective of a compiled function, as users see it."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled function.

    - `kind`: such as `all-gather`.
    - `shapes`: of its results on each device, such as `f32[64,64]`; several if the
        compiler combined several operations.
    - `bytes`: of these results.
    - `sent`: the bytes that each device sends, each time: of an all-gather or a
        reduce-scatter over `n` devices, `(n - 1) / n` of the whole; of an all-reduce
        twice that.
    - `times`: how often a call runs it: more than once in the body of a loop, `None` if
        the compiled text does not give the loop's trip count.
    - `in_loop`: whether it is in the body of a loop, such as that over layers.
    - `axes`: the axes of the mesh along which devices take part together; `None` if the
        mesh is not known, or the compiled text does not say.

    Those of a plan also have:

    - `line`: the line of your code that causes it, as `model.py:12`.
    - `function`: the function that this line is in, as `MLP.__call__`.
    - `leaves`: the arrays of the model that it gathers, or whose gradients it reduces. The
        compiler does not say the latter, so arrays of the same shape are named together.
    - `hidden`: the part of its time that passes while the device computes, from 0 to 1;
        `None` if it is not known.
    """

    kind: str
    shapes: tuple[str, ...]
    bytes: int
    sent: int
    times: int | None
    in_loop: bool
    axes: tuple[str, ...] | None = None
    line: str | None = None
    function: str | None = None
    leaves: tuple[str, ...] = ()
    hidden: float | None = None

    @property
    def sent_in_all(self) -> int:
        """The bytes that each device sends in a call; of a loop of unknown length, once."""
        return self.sent * (1 if self.times is None else self.times)


def join_axes(axes: Iterable[str] | None) -> str:
    """The axes of a mesh as one word: `data,fsdp`."""
    return "unknown" if axes is None else ",".join(axes)
