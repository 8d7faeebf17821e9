"""Bars whose parts are as long as their shares, and their legends."""

from collections.abc import Sequence
from typing import NamedTuple

from ._html import Markup, tag


class Part(NamedTuple):
    """A part of a bar: the class that colours it, its name, its size, also as text."""

    style: str
    name: str
    size: int | float
    text: str


def draw_bar(
    parts: Sequence[Part], whole: int | float, limit: int | float | None = None
) -> Markup:
    """A bar of parts, beside a mark at a limit."""
    said = ", ".join(f"{part.name} {part.text}" for part in parts)
    spans = [
        tag(
            "span",
            class_=f"fill {part.style}",
            style=f"width:{percent(part.size, whole)}",
            title=f"{part.name}: {part.text}",
        )
        for part in parts
        if part.size > 0.002 * whole
    ]
    if limit is not None:
        spans.append(tag("span", class_="limit", style=f"left:{percent(limit, whole)}"))
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


def draw_bars(parts: Sequence[Part], whole: int | float, caption: str) -> Markup:
    """A table with a bar in each row."""
    rows = [
        tag(
            "tr",
            tag("th", part.name, scope="row"),
            tag("td", part.text),
            tag("td", draw_bar([part], whole), class_="wide"),
        )
        for part in parts
    ]
    head = tag("caption", caption, class_="unseen")
    return tag("table", head, tag("tbody", *rows), class_="legend bars")


def percent(part: int | float, whole: int | float) -> str:
    """A share as CSS writes it."""
    return f"{100 * part / whole:.3f}%" if whole else "0%"
