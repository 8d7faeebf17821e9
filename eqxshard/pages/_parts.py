"""What every page is made of: a frame, cards, tables."""

import importlib.resources
import string
from collections.abc import Iterable, Mapping, Sequence

from ._html import Markup, join, tag


def fill_page(
    *,
    title: str,
    about: str,
    headline: str,
    tiles: Markup,
    cards: Markup,
    style: str = "",
    script: str = "",
) -> str:
    """A page of HTML, which loads nothing from elsewhere.

    **Arguments:**

    - `title`, `about`, `headline`: text, which is escaped.
    - `tiles`: below the headline.
    - `cards`: all else.
    - `style`, `script`: more of CSS and of JavaScript than every page has.
    """
    own = read_assets("eqxshard.pages")
    return string.Template(own["page.html"]).substitute(
        style=own["page.css"] + style,
        script=own["page.js"] + script,
        title=join(title),
        about=join(about),
        headline=join(headline),
        tiles=tiles,
        cards=cards,
    )


def read_assets(room: str) -> dict[str, str]:
    """The text of each file in the folder `page` of a room, by its name."""
    folder = importlib.resources.files(room) / "page"
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.is_file()
    }


def card(name: str, title: str, *content: Markup) -> Markup:
    """A section with a heading."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag(
        "section",
        heading,
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


def plain_table(caption: str, columns: Iterable[str], rows: Sequence[Markup]) -> Markup:
    """A table whose rows are in the order that they were given."""
    head = [tag("th", name, scope="col") for name in columns]
    return tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *rows),
    )


def sortable_table(
    name: str,
    caption: str,
    columns: Mapping[str, bool],
    rows: Sequence[Markup],
    what: str,
    ordered: str | None = "In all",
) -> Markup:
    """A table to search and sort.

    **Arguments:**

    - `name`: of the table on its page.
    - `caption`: what it is a table of.
    - `columns`: by name, whether they are numbers.
    - `rows`: in their first order.
    - `what`: what a row is, such as `arrays`.
    - `ordered`: the column that they are ordered by, the largest first.
    """
    label = tag("label", f"Search {what}", for_=f"{name}-search")
    field = tag("input", id=f"{name}-search", type="search", autocomplete="off")
    count = tag("output", f"{len(rows):,} {what}", for_=f"{name}-search", data_what=what)
    search = tag("div", label, field, count, class_="search", hidden=True)
    head = [
        tag(
            "th",
            tag("button", text, type="button"),
            scope="col",
            aria_sort="descending" if text == ordered else "none",
            class_="number" if is_number else None,
        )
        for text, is_number in columns.items()
    ]
    table = tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *rows),
        id=f"{name}-table",
        class_="sortable",
    )
    return join(search, scroller(caption, table))


def number_cell(text: str, value: int | float | None) -> Markup:
    """A cell of a number, which is sorted by its value."""
    return tag("td", text, data_value=value, class_="number")


def scroller(name: str, content: Markup) -> Markup:
    """A box that scrolls sideways, also by the keyboard."""
    options = {"role": "region", "aria_label": name, "tabindex": 0}
    return tag("div", content, class_="scroller", **options)
