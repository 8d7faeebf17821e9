"""What every page is made of: a frame, cards, tiles, tables and bars."""

import importlib.resources
import math
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._format import format_value
from ._html import Markup, join, tag


class Number(NamedTuple):
    """A number in a table: its text, and the value that it is sorted by."""

    text: str
    value: int | float | None


class Part(NamedTuple):
    """A part of a bar: the class that colours it, its name, its size, also as text."""

    style: str
    name: str
    size: int | float
    text: str


#: A cell of a table: text, which is escaped, markup, or a number.
Cell = str | Number
#: The same, or a number that is written as `number` does.
Entry = Cell | int | float | None


def number(value: int | float | None, text: Callable[[Any], str] = format_value) -> Number:
    """A number in a table; empty if it is not known, or not finite."""
    if value is None or not math.isfinite(value):
        return Number("", None)
    return Number(text(value), value)


def fill_page(
    *, title: str, about: str, headline: str, tiles: Markup, cards: Iterable[Markup]
) -> str:
    """A page of HTML, which loads nothing from elsewhere.

    **Arguments:**

    - `title`, `about`, `headline`: text, which is escaped.
    - `tiles`: below the headline.
    - `cards`: all else.
    """
    folder = importlib.resources.files("eqxshard.pages") / "page"
    assets = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return string.Template(assets["page.html"]).substitute(
        style=assets["page.css"] + assets["curves.css"],
        script=assets["page.js"] + assets["curves.js"],
        title=join(title),
        about=join(about),
        headline=join(headline),
        tiles=tiles,
        cards=join(*cards),
    )


def card(name: str, title: str, *content: Markup) -> Markup:
    """A section with a heading; nothing without content."""
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
    """What to see first: by name, a value and a few words on it."""
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


def plain_table(
    caption: str, columns: Iterable[str], rows: Iterable[Sequence[Entry]]
) -> Markup:
    """A table whose rows are in the order that they were given."""
    head = [tag("th", name, scope="col") for name in columns]
    return tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *map(_row, rows)),
    )


def sortable_table(
    name: str,
    columns: Iterable[str],
    rows: Sequence[Sequence[Entry]],
    ordered: str | None = None,
) -> Markup:
    """A table to search and sort.

    **Arguments:**

    - `name`: what its rows are, such as `arrays`.
    - `columns`: their names.
    - `rows`: in their first order.
    - `ordered`: the column that they are ordered by, the largest first.
    """
    label = tag("label", f"Search {name}", for_=f"{name}-search")
    field = tag("input", id=f"{name}-search", type="search", autocomplete="off")
    count = tag("output", f"{len(rows):,} {name}", for_=f"{name}-search", data_what=name)
    head = [
        tag(
            "th",
            tag("button", text, type="button"),
            scope="col",
            aria_sort="descending" if text == ordered else "none",
            class_=None if isinstance(cell, str) else "number",
        )
        for text, cell in zip(columns, rows[0], strict=True)
    ]
    table = tag(
        "table",
        tag("caption", name, class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *map(_row, rows)),
        id=f"{name}-table",
        class_="sortable",
    )
    search = tag("div", label, field, count, class_="search", hidden=True)
    return join(search, scroller(f"table of {name}", table))


def _row(cells: Sequence[Entry]) -> Markup:
    """A row, of which the first cell is the heading."""
    (first, *others) = cells
    return tag("tr", _cell("th", first, scope="row"), *(_cell("td", x) for x in others))


def _cell(kind: str, cell: Entry, **options: str) -> Markup:
    if isinstance(cell, str):
        return tag(kind, cell, **options)
    found = cell if isinstance(cell, Number) else number(cell)
    return tag(kind, found.text, data_value=found.value, class_="number", **options)


def scroller(name: str, content: Markup) -> Markup:
    """A box that scrolls sideways, also by the keyboard."""
    options = {"role": "region", "aria_label": name, "tabindex": 0}
    return tag("div", content, class_="scroller", **options)


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
