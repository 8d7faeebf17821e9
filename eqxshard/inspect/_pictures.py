"""`draw`: which device holds which block of an array, as text and as an SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._errors import UsageTypeError
from ..pages._kit import Markup, tag
from ..sharding._mesh import describe_mesh
from ..sharding._spec import axes_of, check_spec, format_sizes, format_spec
from ._tables import format_shape, render

#: The colours of devices, in turn: the hues of Okabe and Ito, which colour-blind readers
#: can tell apart, light enough for black labels.
_COLOURS = ("#56b4e9", "#e69f00", "#3cbf9b", "#f0e442")
_COLOURS += ("#92a8e8", "#f08a5d", "#dda0c8", "#bfbfbf")
#: The pixels of a line of text, of the width of a letter, and of the sides of an array.
_LINE, _LETTER, _WIDTH, _HEIGHT = 15, 6.9, 150, 96

#: The numbers of the devices that hold each block, row by row.
_Blocks = list[list[list[int]]]


@dataclass(frozen=True, repr=False)
class Picture:
    """The blocks of an array and the devices that hold them, from [`eqxshard.draw`][].

    - `text`: a table of the devices' numbers, which `print` shows.
    - `svg`: an image, which notebooks show. Each device has a colour, and a block that
        several devices hold has the colours of all of them.
    """

    text: str
    svg: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.svg


def draw(
    array: Any, mesh: Mesh | None = None, spec: PartitionSpec | None = None
) -> Picture:
    """Draw which device holds which block of an array.

    **Arguments:**

    - `array`: an array on a mesh, or a `jax.ShapeDtypeStruct` with a sharding; or a shape,
        such as `(8, 16)`.
    - `mesh`, `spec`: with a shape, how an array of that shape would be split.

    **Returns:**

    An [`eqxshard.inspect.Picture`][]: `print` it, or make it the last line of a notebook's
    cell.

    **Raises:**

    `TypeError` if the array is not on a mesh; `ValueError` if the spec does not fit the
    shape and the mesh.

    !!! Example

        ```python
        mesh = eqxshard.make_mesh(data=2, fsdp=4)
        print(eqxshard.draw((8, 16), mesh, P("fsdp", "data")))
        ```
    """
    if mesh is not None and spec is not None:
        check_spec("", tuple(array), spec, mesh)
        array = jax.ShapeDtypeStruct(array, float, sharding=NamedSharding(mesh, spec))
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise UsageTypeError(
            f"draw: this {type(array).__name__} is not an array on a mesh; place it with "
            "eqxshard.filter_shard, or give draw a shape, a mesh and a PartitionSpec."
        )
    rows, columns, blocks = _lay_out(array.shape, sharding)
    down, across = _label(rows, sharding), _label(columns, sharding)
    title = f"{format_shape(array.shape)}, {format_spec(sharding.spec)}"
    return Picture(
        _print(f"{title} on {describe_mesh(sharding.mesh)}", down, across, blocks),
        _svg(title, down, across, blocks),
    )


def _lay_out(
    shape: tuple[int, ...], sharding: NamedSharding
) -> tuple[list[int], list[int], _Blocks]:
    """The dims along the rows, the dim along the columns, and the blocks.

    If more than two dims are split, all but the last are along the rows, and the first of
    them changes most slowly.
    """
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        starts = tuple(part.indices(size)[0] for part, size in zip(index, shape))
        holders.setdefault(starts, []).append(device.id)
    cuts = [len(set(starts)) for starts in zip(*holders)]
    split = [dim for dim, parts in enumerate(cuts) if parts > 1]
    whole = [dim for dim, parts in enumerate(cuts) if parts == 1]
    shown = sorted([*split, *whole[::-1]][: max(2, len(split))])
    rows: dict[tuple[int, ...], list[list[int]]] = {}
    # Sorted by their starts, blocks are row by row.
    for starts, devices in sorted(holders.items()):
        rows.setdefault(tuple(starts[dim] for dim in shown[:-1]), []).append(devices)
    return shown[:-1], shown[-1:], list(rows.values())


def _label(dims: Sequence[int], sharding: NamedSharding) -> str:
    """The label of a side: `dim 0 over data=2, dim 1`."""
    labels = []
    for dim in dims:
        axes = axes_of(sharding.spec[dim]) if dim < len(sharding.spec) else ()
        sizes = {axis: sharding.mesh.shape[axis] for axis in axes}
        over = format_sizes({axis: size for axis, size in sizes.items() if size > 1})
        labels.append(f"dim {dim} over {over}" if over else f"dim {dim}")
    return ", ".join(labels)


def _list_devices(devices: Sequence[int]) -> str:
    many = len(devices) > len(_COLOURS)
    return f"{len(devices)} devices" if many else ",".join(map(str, devices))


def _print(title: str, down: str, across: str, blocks: _Blocks) -> str:
    from rich.table import Table

    table = Table(show_header=False, show_lines=True)
    for row in blocks:
        table.add_row(*map(_list_devices, row))
    sides = {"rows": down, "columns": across}
    labels = [f"{name}: {label}" for name, label in sides.items() if label]
    return "\n".join([title, *labels, render(table)])


def _svg(title: str, down: str, across: str, blocks: _Blocks) -> Markup:
    left, top, high = _LINE + 3, 2 * _LINE, max(_HEIGHT, len(down) * _LETTER)
    shapes = [
        _text(0, _LINE - 4, title, font_weight=600),
        _text(left, top - 4, across),
        _text(0, 0, down, transform=f"translate({_LINE - 7} {top}) rotate(90)"),
    ]
    height, width = high / len(blocks), _WIDTH / len(blocks[0])
    for y, row in enumerate(blocks):
        for x, devices in enumerate(row):
            box = left + x * width, top + y * height, width, height
            shapes += _block(box, devices)
    right = max(left + _WIDTH, len(title) * _LETTER, left + len(across) * _LETTER)
    size = {"width": f"{right + 2:.0f}", "height": f"{top + high + 2:.0f}"}
    return tag(
        "svg",
        *shapes,
        xmlns="http://www.w3.org/2000/svg",
        class_="eqxshard",
        **size,
        viewBox=f"-1 -1 {' '.join(size.values())}",
        role="img",
        aria_label=title,
        fill="#777",  # The text is readable on light and on dark pages.
        font_family="ui-sans-serif, system-ui, sans-serif",
        font_size=11,
    )


def _block(box: tuple[int | float, ...], devices: Sequence[int]) -> Iterator[Markup]:
    """A rectangle with a band for each of a few devices, and their numbers if these fit."""
    x, y, width, height = box
    bands = [_COLOURS[id % len(_COLOURS)] for id in devices]
    if len(bands) > len(_COLOURS):
        bands = [_COLOURS[-1]]
    part = width / len(bands)
    for i, colour in enumerate(bands):
        yield _rectangle(x + i * part, y, part, height, fill=colour)
    yield _rectangle(x, y, width, height, fill="none", stroke="#333")
    label = _list_devices(devices)
    if len(label) * _LETTER < width and height > 11:
        black = {"text_anchor": "middle", "style": "fill:#111"}
        yield _text(x + width / 2, y + height / 2 + 4, label, **black)


def _rectangle(*box: int | float, **options: Any) -> Markup:
    sides = {side: f"{size:g}" for side, size in zip(("x", "y", "width", "height"), box)}
    return tag("rect", **sides, **options)


def _text(x: int | float, y: int | float, text: str, **options: Any) -> Markup:
    return tag("text", text, x=f"{x:g}", y=f"{y:g}", **options)
