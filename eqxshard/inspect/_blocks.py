"""Which device holds which block of an array, laid out in two dimensions."""

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding

from ..sharding._spec import axes_of, format_sizes


class Block(NamedTuple):
    """A block of an array, in elements from the left and from the top."""

    left: int
    top: int
    width: int
    height: int
    devices: list[int]


class Layout(NamedTuple):
    """An array as a rectangle of blocks.

    - `rows`, `columns`: the dims along its two sides. If more than two dims are split,
        all but the last are along the rows, the first with the largest blocks.
    - `blocks`: row by row.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    blocks: list[Block]


def lay_out(shape: tuple[int, ...], sharding: NamedSharding) -> Layout:
    """Arrange the blocks of an array."""
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ends = [part.indices(size) for part, size in zip(index, shape, strict=True)]
        where = tuple((start, stop) for start, stop, _ in ends)
        holders.setdefault(where, []).append(device.id)
    cuts = tuple(len(set(parts)) for parts in zip(*holders))
    split = [dim for dim, parts in enumerate(cuts) if parts > 1]
    rest = [dim for dim, parts in enumerate(cuts) if parts == 1]
    shown = sorted([*split, *rest[::-1]][: max(2, len(split))])
    rows, columns = tuple(shown[:-1]), tuple(shown[-1:])

    def along(side: tuple[int, ...], where: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        """The start of a block along a side, and its length."""
        number, length = 0, 1
        for dim in side:
            start, stop = where[dim]
            # An empty array is drawn as if it had elements.
            size = max(1, stop - start)
            number, length = number * cuts[dim] + start // size, length * size
        return number * length, length

    blocks = []
    for where, devices in holders.items():
        (left, width), (top, height) = along(columns, where), along(rows, where)
        blocks.append(Block(left, top, width, height, devices))
    return Layout(rows, columns, sorted(blocks, key=lambda b: (b.top, b.left)))


def format_devices(devices: Sequence[int]) -> str:
    """Numbers in a few characters: `0-3`, `0,2,4,6`."""
    runs: list[list[int]] = []
    for number in sorted(devices):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    ]
    return ",".join(words)


def format_side(dims: tuple[int, ...], sharding: NamedSharding) -> str:
    """The label of a side: `dim 0 over data=2, dim 1`."""
    labels = []
    for dim in dims:
        entry = sharding.spec[dim] if dim < len(sharding.spec) else None
        sizes = {axis: sharding.mesh.shape[axis] for axis in axes_of(entry)}
        terms = format_sizes({axis: size for axis, size in sizes.items() if size > 1})
        labels.append(f"dim {dim} over {terms}" if terms else f"dim {dim}")
    return ", ".join(labels)
