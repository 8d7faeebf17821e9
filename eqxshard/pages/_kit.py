"""The parts of every page: escaped markup, a frame, cards, tiles, tables and bars."""

import importlib.resources
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from ._format import format_value


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, *children: str, **attributes: Any) -> Markup:
    """An HTML element.

    **Arguments:**

    - `name`: the element's name, such as `td`.
    - `children`: text, which is escaped, or `Markup`.
    - `attributes`: the element's attributes; those that are `None` are left out. Their
        names are written with `_` for `-`, and `class_` for `class`.
    """
    head = [name]
    for key, value in attributes.items():
        plain = key.strip("_").replace("_", "-")
        if value is not None:
            head.append(f'{plain}="{escape(str(value))}"')
    return Markup(f"<{' '.join(head)}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Several elements, or text, one after the other."""
    parts = (x if isinstance(x, Markup) else escape(x) for x in children)
    return Markup("".join(parts))


class Number(str):
    """Text that a table aligns on the right, as it does numbers."""


class Part(NamedTuple):
    """A part of a bar: the class that colours it, its name, and its size, also as text."""

    style: str
    name: str
    size: int | float
    text: str


#: A cell of a table: text, which is escaped, markup, or a number.
Entry = str | int | float | None


def number(value: int | float | None, text: Callable[[Any], str] = format_value) -> Number:
    """A number in a table; empty if it is not known, or not finite."""
    if value is None or not math.isfinite(value):
        return Number("")
    return Number(text(value))


def fill_page(
    *, title: str, about: str, headline: str, tiles: Markup, cards: Iterable[Markup]
) -> str:
    """A page of HTML, which loads nothing from elsewhere.

    **Arguments:**

    - `title`, `about`, `headline`: text, which is escaped.
    - `tiles`: below the headline.
    - `cards`: the rest of the page.
    """
    folder = importlib.resources.files("eqxshard.pages") / "page"
    frame, style = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css")
    )
    return string.Template(frame).substitute(
        style=style,
        title=join(title),
        about=join(about),
        headline=join(headline),
        tiles=tiles,
        cards=join(*cards),
    )


def card(name: str, title: str, *content: Markup) -> Markup:
    """A section with a heading; empty if it has no content."""
    if not content:
        return Markup("")
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        *content,
        id=name,
        aria_labelledby=f"{name}-title",
        class_="card",
    )


def pair(*cards: Markup) -> Markup:
    """Cards side by side, where there is room."""
    found = [each for each in cards if each]
    return tag("div", *found, class_="pair") if found else Markup("")


def draw_tiles(tiles: Mapping[str, tuple[str, str]]) -> Markup:
    """The figures at the top of a page: by name, a value and a few words about it."""
    boxes = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more)))
        for name, (value, more) in tiles.items()
    ]
    return tag("dl", *boxes, class_="tiles")


def settings_list(settings: Mapping[str, str]) -> Markup:
    """Names and their values."""
    pairs = [
        tag("div", tag("dt", name), tag("dd", text)) for name, text in settings.items()
    ]
    return tag("dl", *pairs, class_="settings")


def draw_table(
    name: str, columns: Iterable[str], rows: Sequence[Sequence[Entry]]
) -> Markup:
    """A table in a box that scrolls sideways, also by the keyboard.

    **Arguments:**

    - `name`: the table's name, such as `arrays`.
    - `columns`: the names of the columns.
    - `rows`: at least one. The first cell of each is its heading.
    """
    cells = [[_as_text(entry) for entry in row] for row in rows]
    head = [_cell("th", text, cell, "col") for text, cell in zip(columns, cells[0])]
    body = [
        tag("tr", _cell("th", first, first, "row"), *(_cell("td", x, x) for x in others))
        for first, *others in cells
    ]
    table = tag(
        "table",
        tag("caption", name, class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
    )
    options = {"role": "region", "aria_label": f"table of {name}", "tabindex": 0}
    return tag("div", table, class_="scroller", **options)


def _as_text(entry: Entry) -> str:
    return entry if isinstance(entry, str) else number(entry)


def _cell(kind: str, text: str, like: str, scope: str | None = None) -> Markup:
    """A cell, on the right if a cell of its column is."""
    style = "number" if isinstance(like, Number) else None
    return tag(kind, text, scope=scope, class_=style)


def draw_bar(
    parts: Sequence[Part], whole: int | float, limit: int | float | None = None
) -> Markup:
    """A bar of parts that are as long as their shares, with a mark at a limit."""
    said = ", ".join(f"{part.name} {part.text}" for part in parts)
    spans = [
        tag(
            "span",
            class_=f"fill {part.style}",
            style=f"width:{_percent(part.size, whole)}",
            title=f"{part.name}: {part.text}",
        )
        for part in parts
        if part.size > 0.002 * whole
    ]
    if limit is not None:
        spans.append(tag("span", class_="limit", style=f"left:{_percent(limit, whole)}"))
    return tag("div", *spans, class_="bar", role="img", aria_label=said)


def draw_legend(parts: Sequence[Part], whole: int | float, caption: str) -> Markup:
    """The parts of a bar as a table, with their shares."""
    rows = [
        tag(
            "tr",
            tag("th", tag("span", class_=f"swatch {part.style}"), part.name, scope="row"),
            tag("td", part.text),
            tag("td", f"{part.size / whole:.1%}" if whole else "", class_="share"),
        )
        for part in parts
    ]
    head = tag("caption", caption, class_="unseen")
    return tag("table", head, tag("tbody", *rows), class_="legend")


def _percent(part: int | float, whole: int | float) -> str:
    """A share as CSS writes it."""
    return f"{100 * part / whole:.3f}%" if whole else "0%"
