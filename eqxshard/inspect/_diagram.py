"""Diagrams of which device holds which block of an array."""

import colorsys
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jax.sharding import NamedSharding

from ..sharding._spec import axes_of, format_sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Of labels, in points: the largest that fits is used; the smallest is still readable.
_FONT_SIZES = (9, 8, 7, 6, 5)
#: The width and height of a character in a one-point font, in inches.
_WIDTH, _HEIGHT = 0.62 / 72, 1.3 / 72
#: The margin around the label of a block, in inches.
_MARGIN = 0.06
#: How many runs of device numbers a label lists.
_RUNS = 32


class Panel(NamedTuple):
    """One array to draw."""

    title: str
    subtitle: str
    shape: tuple[int, ...]
    sharding: NamedSharding


class _Block(NamedTuple):
    """A block of an array, in elements from the left and from the top."""

    left: int
    top: int
    width: int
    height: int
    devices: list[int]

    @property
    def label(self) -> str:
        return format_devices(self.devices)


class Layout(NamedTuple):
    """A rectangle of blocks.

    - `rows`, `columns`: the dims along its two sides. If more than two dims are split,
        all but the last are along the rows, the first with the largest blocks.
    - `cuts`: for each dim of the array, the number of parts that it is split into.
    - `blocks`: row by row.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    cuts: tuple[int, ...]
    blocks: list[_Block]


def draw_panels(panels: Sequence[Panel], title: str, footnote: str) -> "Figure":
    """Draw each array as a rectangle, cut into blocks that name their devices."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "draw needs Matplotlib; install it with `pip install 'eqxshard[recipes]'`."
        ) from error
    layouts = [lay_out(panel.shape, panel.sharding) for panel in panels]
    width = max([3.0, *map(_least_width, layouts)])
    heights = [_least_height(layout, width) for layout in layouts]
    columns = max(1, min(len(panels), 4, int(15 / width)))
    # Around each panel, there is room for its title and its labels.
    tall = [max(heights[i : i + columns]) + 1 for i in range(0, len(panels), columns)]
    size = columns * (width + 0.8), sum(tall) + 0.8
    figure = Figure(size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(footnote, fontsize=9)
    if panels:
        grid = figure.subplots(len(tall), columns, squeeze=False, height_ratios=tall)
        for panel, layout, height, axes in zip(panels, layouts, heights, grid.flat):
            _draw(axes, panel, layout, width, height)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
    return figure


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
    if len(words) > _RUNS:
        return f"{','.join(words[:3])},...,{words[-1]} ({len(devices)} devices)"
    return ",".join(words)


def lay_out(shape: tuple[int, ...], sharding: NamedSharding) -> Layout:
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
        blocks.append(_Block(left, top, width, height, devices))
    return Layout(rows, columns, cuts, sorted(blocks, key=lambda b: (b.top, b.left)))


def _least_width(layout: Layout) -> float:
    """The width of a panel whose blocks fit the longest word of a label, in inches."""
    words = [word for block in layout.blocks for word in _words(block.label).split()]
    return _parts(layout, layout.columns) * _inches(max(map(len, words)), _WIDTH)


def _least_height(layout: Layout, width: float) -> float:
    """The height of a panel of this width whose blocks fit their labels, in inches."""
    room = width / _parts(layout, layout.columns)
    lines = max(len(_lines(block.label, room, _FONT_SIZES[-1])) for block in layout.blocks)
    least = 1.7 if layout.rows else 0.5
    return max(least, _parts(layout, layout.rows) * _inches(lines, _HEIGHT))


def _parts(layout: Layout, side: tuple[int, ...]) -> int:
    return math.prod(layout.cuts[dim] for dim in side)


def _inches(characters: int, each: float, points: int = _FONT_SIZES[-1]) -> float:
    return characters * each * points + _MARGIN


def _words(label: str) -> str:
    return label.replace(",", ", ")


def _lines(label: str, room: float, points: int) -> list[str]:
    """A label, broken at its commas to fit a width in inches."""
    characters = max(1, int((room - _MARGIN) / (_WIDTH * points) + 1e-6))
    lines = textwrap.wrap(
        _words(label), characters, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(", ", ",") for line in lines]


def _font_size(layout: Layout, width: float, height: float) -> int:
    """The largest font size in which every label fits its block."""
    width /= _parts(layout, layout.columns)
    height /= _parts(layout, layout.rows)

    def fits(label: str, points: int) -> bool:
        lines = _lines(label, width, points)
        wide, high = max(map(len, lines)), len(lines)
        return (
            _inches(wide, _WIDTH, points) <= width
            and _inches(high, _HEIGHT, points) <= height
        )

    for points in _FONT_SIZES:
        if all(fits(block.label, points) for block in layout.blocks):
            return points
    return _FONT_SIZES[-1]


def _draw(axes: "Axes", panel: Panel, layout: Layout, width: float, height: float) -> None:
    blocks, last = layout.blocks, layout.blocks[-1]
    right, bottom = last.left + last.width, last.top + last.height
    points = _font_size(layout, width, height)
    for i, block in enumerate(blocks):
        colour = "#e4e4e4" if len(blocks) == 1 else _colour(i / len(blocks))
        axes.bar(
            block.left,
            block.height,
            block.width,
            block.top,
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=1,
        )
        axes.text(
            block.left + block.width / 2,
            block.top + block.height / 2,
            "\n".join(_lines(block.label, width * block.width / right, points)),
            fontsize=points,
            ha="center",
            va="center",
            linespacing=1.1,
        )
    axes.set_xlim(0, right)
    axes.set_ylim(bottom, 0)
    if not layout.rows:
        # A strip, aligned with the top of its neighbours.
        axes.set_box_aspect(height / width)
        axes.set_anchor("N")
    axes.set_xlabel(_wrap(format_side(layout.columns, panel), width, 8), fontsize=8)
    axes.set_ylabel(_wrap(format_side(layout.rows, panel), height, 8), fontsize=8)
    axes.set_xticks(_ticks(layout.columns, layout, right, 5))
    axes.set_yticks(_ticks(layout.rows, layout, bottom, 9))
    axes.tick_params(labelsize=7, length=2, color="#999999")
    axes.spines[:].set_visible(False)
    hidden = [d for d in range(len(panel.shape)) if d not in layout.rows + layout.columns]
    notes = [panel.subtitle, *(f"dim {dim} is whole" for dim in hidden)]
    below = "\n".join(_wrap(note, width, 8) for note in notes)
    axes.annotate(
        below,
        (0, 1),
        (0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color="#555555",
        va="bottom",
    )
    axes.set_title(
        _wrap(panel.title, width, 10),
        fontsize=9,
        fontweight="bold",
        loc="left",
        pad=8 + 10 * len(below.splitlines()),
    )


def _wrap(text: str, width: float, points: int) -> str:
    return "\n".join(textwrap.wrap(text, int(width / (_WIDTH * points))))


def format_side(dims: tuple[int, ...], panel: Panel) -> str:
    """The label of a side."""
    labels = []
    for dim in dims:
        entry = panel.sharding.spec[dim] if dim < len(panel.sharding.spec) else None
        sizes = {axis: panel.sharding.mesh.shape[axis] for axis in axes_of(entry)}
        terms = format_sizes({axis: size for axis, size in sizes.items() if size > 1})
        labels.append(f"dim {dim} over {terms}" if terms else f"dim {dim}")
    return ", ".join(labels)


def _ticks(side: tuple[int, ...], layout: Layout, length: int, most: int) -> list[int]:
    """The elements where blocks begin. With several dims there is no single number."""
    if len(side) != 1:
        return []
    parts = layout.cuts[side[0]]
    return [*range(0, length + 1, length // parts)] if parts < most else [0, length]


def _colour(hue: float) -> tuple[float, float, float]:
    """A colour light enough to read a label on."""
    return colorsys.hls_to_rgb(hue, 0.82, 0.6)
