"""The picture of a mesh: its devices, and the hosts that they are on."""

from collections.abc import Mapping, Sequence

from ._html import Markup, tag

#: In pixels: a device, the gaps between devices and between blocks of them, a label.
_CELL, _GAP, _BLOCK_GAP, _LABEL = 26, 4, 20, 20
#: The most devices along an axis that are drawn: inside a block, and of blocks.
_INSIDE, _BLOCKS = 8, 2

#: Where something is along a side: its index along each axis, `None` for dots; its place.
_Slot = tuple[Mapping[str, int | None], int]


def draw_mesh(mesh: Mapping[str, int], per_host: int) -> Markup:
    """The devices of a mesh: the last two axes in blocks, two more between blocks."""
    names = [*mesh][-4:]
    # Each from the inside.
    across, down = names[::-1][0::2], names[::-1][1::2]
    columns, width = _slots(across, mesh)
    rows, height = _slots(down, mesh)
    left, top = _LABEL * len(down), _LABEL * len(across)
    shapes = [
        shape
        for below, y in rows
        for beside, x in columns
        for shape in _device({**below, **beside}, x + left, y + top, mesh, per_host)
    ]
    for level, name in enumerate(across):
        move = f"translate({left} {top - 7 - _LABEL * level})"
        shapes.append(tag("text", f"{name} = {mesh[name]:,} →", transform=move))
    for level, name in enumerate(down):
        turn = f"translate({left - 8 - _LABEL * level} {top}) rotate(-90)"
        text, anchor = f"← {name} = {mesh[name]:,}", "end"
        shapes.append(tag("text", text, transform=turn, text_anchor=anchor))
    # Labels may be longer than what they name.
    width, height = max(left + width, 150), max(top + height, left * 5)
    scale = 1.3 if width < 300 else 1.0
    said = ", ".join(f"{axis} of {size}" for axis, size in mesh.items())
    return tag(
        "svg",
        *shapes,
        class_="mesh",
        width=scale * width,
        height=scale * height,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"The mesh: {said}",
    )


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


def _device(
    where: Mapping[str, int | None],
    x: int,
    y: int,
    mesh: Mapping[str, int],
    per_host: int,
) -> list[Markup]:
    """A device with its number, or dots in the place of those that are left out."""
    if None in where.values():
        return [tag("text", "…", x=x + 1, y=y + _CELL / 2 + 4)]
    number, names = 0, [name for name in mesh if name in where]
    for name in names:
        number = number * mesh[name] + (where[name] or 0)
    host = number // per_host
    place = ", ".join(f"{name} {where[name]}" for name in names)
    said = tag("title", f"device {number:,}: {place}; host {host:,}")
    shape = {"width": _CELL, "height": _CELL, "rx": 4}
    style = "even" if host % 2 == 0 else "odd"
    found = [tag("rect", said, x=x, y=y, class_=style, **shape)]
    if number < 10_000:
        middle = {"x": x + _CELL / 2, "y": y + _CELL / 2 + 3.5, "text_anchor": "middle"}
        found.append(tag("text", str(number), class_="number", **middle))
    return found
