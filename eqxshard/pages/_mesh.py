"""The picture of a mesh: its devices, and the hosts that they are on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._html import Markup, tag

#: In pixels: a device, the gaps between devices and between blocks of them, a label.
_CELL, _GAP, _BLOCK_GAP, _LABEL = 26, 4, 20, 20
#: The most devices along an axis that are drawn: inside a block, and of blocks.
_INSIDE, _BLOCKS = 8, 2

#: Where something is along a side: its index along each axis, `None` for dots; its place.
_Slot = tuple[Mapping[str, int | None], int]


class Look(NamedTuple):
    """How a device is drawn: its number, its description, how its rectangle is filled."""

    number: int
    said: str
    attributes: Mapping[str, Any]


def draw_mesh(mesh: Mapping[str, int], per_host: int) -> Markup:
    """The devices of a mesh on a page; hosts, in turn, differ in shade."""

    def look(number: int, where: Mapping[str, int]) -> Look:
        place = ", ".join(f"{axis} {index}" for axis, index in where.items())
        host = number // per_host
        said = f"device {number:,}: {place}; host {host:,}"
        return Look(number, said, {"class_": "even" if host % 2 == 0 else "odd"})

    shapes, width, height = mesh_shapes(mesh, look)
    scale = 1.3 if width < 300 else 1.0
    return tag(
        "svg",
        *shapes,
        class_="mesh",
        width=scale * width,
        height=scale * height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"The mesh: {', '.join(f'{axis} of {n}' for axis, n in mesh.items())}",
    )


def mesh_shapes(
    mesh: Mapping[str, int], look: Callable[[int, Mapping[str, int]], Look]
) -> tuple[list[Markup], int, int]:
    """The devices of a mesh: the last two axes in blocks, two more between blocks.

    **Arguments:**

    - `mesh`: the sizes of its axes, of which four may be larger than 1.
    - `look`: from a device's position in the mesh, and its index along each axis.

    **Returns:**

    Elements of an SVG, and the width and the height that they need.
    """
    names = [*mesh][-4:]
    # Each from the inside.
    across, down = names[::-1][0::2], names[::-1][1::2]
    columns, width = _slots(across, mesh)
    rows, height = _slots(down, mesh)
    left, top = _LABEL * len(down), _LABEL * len(across)
    shapes = []
    for below, y in rows:
        for beside, x in columns:
            found = {**below, **beside}
            if None in found.values():  # In the place of those that are left out.
                shapes.append(tag("text", "…", x=x + left + 1, y=y + top + _CELL / 2 + 4))
                continue
            where = {axis: found[axis] or 0 for axis in names}
            number = 0
            for axis, index in where.items():
                number = number * mesh[axis] + index
            shapes += _device(look(number, where), x + left, y + top)
    for level, name in enumerate(across):
        move = f"translate({left} {top - 7 - _LABEL * level})"
        shapes.append(tag("text", f"{name} = {mesh[name]:,} →", transform=move))
    for level, name in enumerate(down):
        turn = f"translate({left - 8 - _LABEL * level} {top}) rotate(-90)"
        text, anchor = f"← {name} = {mesh[name]:,}", "end"
        shapes.append(tag("text", text, transform=turn, text_anchor=anchor))
    # Labels may be longer than what they name.
    return shapes, max(left + width, 150), max(top + height, left * 5)


def _slots(axes: Sequence[str], mesh: Mapping[str, int]) -> tuple[list[_Slot], int]:
    """Where the devices are along a side, whose axes are nested; and its length."""
    slots: list[_Slot] = [({}, 0)]
    length, gap, most = _CELL, _GAP, _INSIDE
    for axis in axes:
        size, at, outer = mesh[axis], 0, list[_Slot]()
        for index in range(size) if size <= most else [*range(most - 1), None, size - 1]:
            if index is None:
                outer.append(({axis: None}, at))
                at += _CELL // 2 + gap
            else:
                outer += [({**where, axis: index}, at + place) for where, place in slots]
                at += length + gap
        slots, length, gap, most = outer, at - gap, _BLOCK_GAP, _BLOCKS
    return slots, length


def _device(look: Look, x: int, y: int) -> Iterator[Markup]:
    side = {"width": _CELL, "height": _CELL, "rx": 4}
    yield tag("rect", tag("title", look.said), x=x, y=y, **side, **look.attributes)
    if look.number < 10_000:
        middle = {"x": x + _CELL / 2, "y": y + _CELL / 2 + 3.5, "text_anchor": "middle"}
        # A page has colours of its own for it.
        yield tag("text", str(look.number), class_="number", fill="#111", **middle)
