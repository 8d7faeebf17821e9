"""`draw`: meshes and arrays as pictures for notebooks and pages."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from .._errors import UsageError, UsageTypeError
from ..pages._kit import Markup, tag
from ..pages._mesh import Look, mesh_shapes
from ..sharding._leaves import array_leaves
from ..sharding._mesh import describe_mesh
from ..sharding._spec import axes_of, check_axis, format_sizes, format_spec
from ._tables import format_shape

_T = TypeVar("_T")

#: Of devices, in turn: the hues of Okabe and Ito, which colour-blind readers can tell
#: apart, light enough for black labels.
_COLOURS = ("#56b4e9", "#e69f00", "#3cbf9b", "#f0e442")
_COLOURS += ("#92a8e8", "#f08a5d", "#dda0c8", "#bfbfbf")
#: The most panels of a picture, which says how many more there are.
_MOST = 12
#: In pixels: a line of text, a letter, a bold one.
_LINE, _LETTER, _BOLD = 15, 6.3, 6.9
#: In pixels: the sides of an array.
_WIDTH, _HEIGHT = 150, 96
_FAINT = {"opacity": 0.75}


@dataclass(frozen=True)
class Drawing:
    """One panel: SVG elements, and the size that they need."""

    width: int | float
    height: int | float
    label: str
    elements: list[Markup]


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture of a mesh or of arrays, from [`eqxshard.draw`][].

    Notebooks show it. There, and in a part of a page, text and lines have the colour of the
    text around the picture, so it suits light and dark pages. An image is on white.
    """

    _panels: tuple[Drawing, ...]
    _note: str

    def save(self, file: str | Path) -> None:
        """Write the picture.

        **Arguments:**

        - `file`: one image if its name ends with `.svg`; if it ends with `.html`, a part of
            a page, whose panels wrap to the page's width.

        **Raises:**

        `ValueError` for any other name.
        """
        file = Path(file)
        if file.suffix not in (".svg", ".html"):
            raise UsageError(
                f"a picture cannot be saved as {file.name!r}; give a name that ends with "
                ".svg or .html."
            )
        file.write_text(self._svg() if file.suffix == ".svg" else self._repr_html_())

    def __repr__(self) -> str:
        return f"<a picture of {len(self._panels)} panels; save writes it to a file>"

    def _repr_html_(self) -> str:
        panels = "\n".join(map(_element, self._panels))
        note = f"\n<p>{escape(self._note)}</p>" if self._note else ""
        style = "display:flex;flex-wrap:wrap;gap:16px 28px;align-items:flex-start"
        return f'<div class="eqxshard" style="{style}">\n{panels}{note}\n</div>\n'

    def _svg(self) -> str:
        """One image, of four panels in a row, on white: it has no page around it."""
        width = max(panel.width for panel in self._panels) + 28
        height = max(panel.height for panel in self._panels) + 16
        rows, columns = math.ceil(len(self._panels) / 4), min(len(self._panels), 4)
        whole_width, bottom = columns * width, rows * height
        whole_height = bottom + (2 * _LINE if self._note else 0)
        parts = [_rectangle(0, 0, whole_width, whole_height, fill="#fff")]
        for i, panel in enumerate(self._panels):
            row, column = divmod(i, 4)
            parts.append(_element(panel, x=14 + column * width, y=8 + row * height))
        if self._note:
            parts.append(_text(14, bottom + _LINE, self._note))
        whole = Drawing(whole_width, whole_height, "", parts)
        return f"{_element(whole, style='color:#111')}\n"


def draw(thing: Mesh | PyTree, *, along: Sequence[str] = ()) -> Picture:
    """Draw a mesh, or which device holds which block of arrays.

    Each device has a colour and its number. A block of an array that several devices hold
    has the colours of all of them.

    **Arguments:**

    - `thing`: a mesh; or an array or a PyTree of arrays that are on a mesh, such as a batch
        or `state.model`, of which the twelve largest are drawn. Arrays may be
        `jax.ShapeDtypeStruct`s with a sharding.
    - `along`: for a mesh, axes of it: devices that communicate along these axes get the
        same colour.

    **Returns:**

    An [`eqxshard.Picture`][]: the last line of a notebook's cell shows it.

    **Raises:**

    `TypeError` if an array is not on a mesh; `ValueError` if there are no arrays, or
    `along` names an axis that the mesh does not have, or is given for arrays.

    !!! Example

        ```python
        mesh = eqxshard.make_mesh(data=2, fsdp=4)
        eqxshard.draw(mesh).save("mesh.svg")
        ```
    """
    if isinstance(thing, Mesh):
        for axis in along:
            check_axis(axis, thing, "along")
        return Picture((_draw_mesh(thing, along),), "")
    if along:
        raise UsageError("along is for meshes; leave it out to draw arrays.")
    leaves = array_leaves(thing)
    shown = keep_largest(leaves, lambda item: item[1].shape)
    arrays = [draw_array(path, leaf.shape, _sharding(path, leaf)) for path, leaf in shown]
    return make_picture(arrays, "arrays", len(leaves) - len(shown))


def keep_largest(items: Sequence[_T], shape: Callable[[_T], Sequence[int]]) -> list[_T]:
    """The twelve arrays of the most elements, in their order."""
    order = sorted(range(len(items)), key=lambda i: -math.prod(shape(items[i])))
    return [items[i] for i in sorted(order[:_MOST])]


def make_picture(panels: Sequence[Drawing], what: str, left_out: int) -> Picture:
    """A picture of panels, which says how many more there are."""
    if not panels:
        raise UsageError("draw: there are no arrays; give it a mesh, a model or a batch.")
    note = f"{left_out} more {what} are not drawn" if left_out > 0 else ""
    return Picture(tuple(panels), note)


def _sharding(path: str, leaf: Any) -> NamedSharding:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise UsageTypeError(
            f"draw: {path or 'the array'} {tuple(leaf.shape)} is not on a mesh; place it "
            "with eqxshard.filter_shard."
        )
    return sharding


def _draw_mesh(mesh: Mesh, along: Sequence[str]) -> Drawing:
    """All devices; those that differ only along some axes have one colour."""
    axes = {axis: n for axis, n in mesh.shape.items() if n > 1} or {"data": 1}
    devices, groups = [*mesh.devices.flat], dict[tuple[int, ...], int]()

    def look(number: int, where: Mapping[str, int]) -> Look:
        apart = tuple(index for axis, index in where.items() if axis not in along)
        group = groups.setdefault(apart, len(groups))
        place = ", ".join(f"{axis}={index}" for axis, index in where.items())
        return Look(devices[number].id, place, {"fill": _COLOURS[group % len(_COLOURS)]})

    title = describe_mesh(mesh)
    title += f", along {', '.join(along)}" if along else ""
    shapes, width, height = mesh_shapes(axes, look)
    elements = [
        _text(0, _LINE - 4, title, font_weight=600),
        tag("g", *shapes, transform=f"translate(0 {2 * _LINE})"),
    ]
    return Drawing(max(width, len(title) * _BOLD), 2 * _LINE + height, title, elements)


def draw_array(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> Drawing:
    """An array as a rectangle, cut into the blocks that devices hold."""
    layout = lay_out(shape, sharding)
    devices = sharding.devices_indices_map(shape)  # In the mesh's order.
    places = {device.id: place for place, device in enumerate(devices)}
    last = layout.blocks[-1]
    wide, high = last.left + last.width, last.top + last.height
    subtitle = f"{format_shape(shape)}, {format_spec(sharding.spec)}"
    lines = [name, subtitle, format_side(layout.columns, sharding)]
    elements, top = [], 0.0
    for line, style in zip(lines, ({"font_weight": 600}, {}, _FAINT)):
        if line:
            top += _LINE
            elements.append(_text(0, top - 4, line, **style))
    left, height = 0, 30
    if layout.rows:
        side = format_side(layout.rows, sharding)
        left, height = _LINE + 3, max(_HEIGHT, len(side) * _LETTER)
        turn = f"translate({_LINE - 7} {top:g}) rotate(90)"
        elements.append(_text(0, 0, side, transform=turn, **_FAINT))
    for block in layout.blocks:
        x, y = left + block.left / wide * _WIDTH, top + block.top / high * height
        size = block.width / wide * _WIDTH, block.height / high * height
        elements += _block((x, y, *size), [places[i] for i in block.devices], block.devices)
    width = max(left + _WIDTH, *(len(line) * _BOLD for line in lines))
    label = f"{name} {subtitle}".strip()
    return Drawing(width, top + height, label, elements)


def _block(
    box: tuple[int | float, ...], places: Sequence[int], devices: Sequence[int]
) -> Iterator[Markup]:
    """A rectangle with a band for each of a few devices, and their numbers if these fit."""
    x, y, width, height = box
    colours = [_COLOURS[place % len(_COLOURS)] for place in places]
    if len(colours) > len(_COLOURS):
        colours = [_COLOURS[-1]]
    band = width / len(colours)
    for i, colour in enumerate(colours):
        yield _rectangle(x + i * band, y, band, height, fill=colour)
    yield _rectangle(x, y, width, height, fill="none", stroke="#333", stroke_width=1.2)
    labels, part = [*map(str, devices)], band
    if len(colours) < len(labels) or max(map(len, labels)) * _LETTER > band:
        labels, part = [format_devices(devices)], width
    if len(labels[0]) * _LETTER < part and height > 11:
        black = {"text_anchor": "middle", "style": "fill:#111"}
        for i, label in enumerate(labels):
            yield _text(x + (i + 0.5) * part, y + height / 2 + 4, label, **black)


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


def _rectangle(*box: int | float, **options: Any) -> Markup:
    sides = {side: f"{size:g}" for side, size in zip(("x", "y", "width", "height"), box)}
    return tag("rect", **sides, **options)


def _text(x: int | float, y: int | float, text: str, **options: Any) -> Markup:
    return tag("text", text, x=f"{x:g}", y=f"{y:g}", **options)


def _element(drawing: Drawing, **where: Any) -> Markup:
    width, height = math.ceil(drawing.width) + 2, math.ceil(drawing.height) + 2
    return tag(
        "svg",
        *drawing.elements,
        xmlns="http://www.w3.org/2000/svg",
        class_="eqxshard",
        **where,
        width=width,
        height=height,
        viewBox=f"-1 -1 {width} {height}",
        role="img" if drawing.label else None,
        aria_label=drawing.label or None,
        fill="currentColor",
        font_family="ui-sans-serif, system-ui, sans-serif",
        font_size=11,
    )
