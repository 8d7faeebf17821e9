"""The picture of a mesh: its devices, and the hosts that they are on."""

from collections.abc import Iterator, Mapping, Sequence

from ._html import Markup, tag

_CELL, _GAP, _BLOCK_GAP, _DOTS = 26, 4, 20, 16
#: The most devices along an axis that are drawn: inside a block, and of blocks.
_INSIDE, _BLOCKS = 8, 2


def draw_mesh(mesh: Mapping[str, int], per_host: int) -> Markup:
    """The devices of a mesh: the last two axes in blocks, two more between blocks."""
    names = [*mesh][-4:]
    sizes = [1] * (4 - len(names)) + [mesh[name] for name in names]
    names = [""] * (4 - len(names)) + names
    columns, width = _slots(sizes[3], _INSIDE, _CELL, _GAP)
    rows, height = _slots(sizes[2], _INSIDE, _CELL, _GAP)
    across, whole_width = _slots(sizes[1], _BLOCKS, width, _BLOCK_GAP)
    down, whole_height = _slots(sizes[0], _BLOCKS, height, _BLOCK_GAP)
    left, top = (sum(20 for name in x if name) for x in (names[0::2], names[1::2]))
    shapes = []
    for y in ((a, b, p + q) for a, p in down for b, q in rows):
        for x in ((a, b, p + q) for a, p in across for b, q in columns):
            at = (y[0], x[0], y[1], x[1])
            place = x[2] + left, y[2] + top
            shapes += _device(at, place, names, sizes, per_host)
    labels = {
        1: (left, 12, "→", ""),
        3: (left, top - 7, "→", ""),
        0: (12, top, "←", "rotate(-90)"),
        2: (left - 8, top, "←", "rotate(-90)"),
    }
    for number, (x, y, arrow, turn) in labels.items():
        if names[number]:
            text = f"{names[number]} = {sizes[number]:,}"
            text = f"{arrow} {text}" if turn else f"{text} {arrow}"
            move, anchor = f"translate({x} {y}) {turn}".strip(), "end" if turn else None
            shapes.append(tag("text", text, transform=move, text_anchor=anchor))
    # Labels may be longer than what they name.
    width, height = max(left + whole_width, 150), max(top + whole_height, left * 5)
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


def _slots(
    count: int, most: int, size: int, gap: int
) -> tuple[list[tuple[int | None, int]], int]:
    """Where devices, or blocks of them, are drawn, and the length; `None` are dots."""
    whole = [*range(count)] if count <= most else [*range(most - 1), None, count - 1]
    slots, at = list[tuple[int | None, int]](), 0
    for number in whole:
        slots.append((number, at))
        at += (_DOTS if number is None else size) + gap
    return slots, at - gap


def _device(
    at: Sequence[int | None],
    place: tuple[int, int],
    names: Sequence[str],
    sizes: Sequence[int],
    per_host: int,
) -> Iterator[Markup]:
    x, y = place
    missing = [number for number, index in enumerate(at) if index is None]
    if len(missing) > 1:
        return
    if missing:
        inner, vertical = missing[0] >= 2, missing[0] % 2 == 0
        first = all(index in (0, None) for index in at[2:])
        if inner or first:
            dx, dy = (_CELL // 2, _DOTS - 2) if vertical else (_DOTS // 2, _CELL // 2 + 4)
            dots = "⋮" if vertical else "…"
            yield tag("text", dots, x=x + dx, y=y + dy, text_anchor="middle")
        return
    number = 0
    for index, size in zip(at, sizes, strict=True):
        number = number * size + (index or 0)
    where = ", ".join(f"{name} {i}" for name, i in zip(names, at, strict=True) if name)
    host = number // per_host
    said = tag("title", f"device {number:,}: {where}; host {host:,}")
    even = "even" if host % 2 == 0 else "odd"
    shape = {"width": _CELL, "height": _CELL, "rx": 4}
    yield tag("rect", said, x=x, y=y, class_=even, **shape)
    if number < 10_000:
        label = {"x": x + _CELL / 2, "y": y + _CELL / 2 + 3.5}
        yield tag("text", str(number), class_="number", text_anchor="middle", **label)
