"""The site: every public name has its place, and the pages work in a browser."""

import importlib
import re
from pathlib import Path

from test_package import FRONTS, PACKAGE, PRIVATE_ROOMS, re_exported

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "pages" / "api"


def find(name):
    """What a dotted name means."""
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def public_names():
    for front in FRONTS:
        rooms = front.parent.relative_to(PACKAGE).parts
        if not {*rooms} & {*PRIVATE_ROOMS}:
            names = [name for name, _ in re_exported(front)]
            yield from (".".join(["eqxshard", *rooms, name]) for name in names)


def test_every_public_name_is_on_a_page_of_the_api():
    """And in the table of all of them."""
    pages = {page.name: page.read_text() for page in API.glob("*.md")}
    index = re.findall(r"\]\[(eqxshard[\w.]+)\]", pages["index.md"])
    shown = re.findall(r"^::: (\S+)", "\n".join(pages.values()), flags=re.MULTILINE)
    assert {*shown} == {*index}
    objects = [find(name) for name in shown]
    missing = [name for name in public_names() if find(name) not in objects]
    # Rooms have pages of their own.
    assert [name for name in missing if not hasattr(find(name), "__path__")] == []
