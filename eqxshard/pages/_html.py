"""HTML in which everything that is not markup is escaped."""

from html import escape
from typing import Any

#: Elements that have no end.
_VOID = ("br", "img", "input")


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, *children: str, **attributes: Any) -> Markup:
    """An element.

    **Arguments:**

    - `name`: such as `td`.
    - `children`: text, which is escaped, or `Markup`.
    - `attributes`: without those that are `None` or `False`. Their names are written with
        `_` for `-`, and `class_` for `class`.
    """
    head = [name]
    for key, value in attributes.items():
        plain = key.strip("_").replace("_", "-")
        if value is True:
            head.append(plain)
        elif value is not None and value is not False:
            head.append(f'{plain}="{escape(str(value))}"')
    end = "" if name in _VOID else f"</{name}>"
    return Markup(f"<{' '.join(head)}>{join(*children)}{end}")


def join(*children: str) -> Markup:
    """Several elements, or text, one after the other."""
    parts = (x if isinstance(x, Markup) else escape(x) for x in children)
    return Markup("".join(parts))
