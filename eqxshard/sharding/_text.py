"""Phrases and numbers in the form in which messages and tables have them."""

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

#: The most items of a list that an error or a warning names.
_SHOWN = 4

#: The warning that a folder has disappeared, and what was in it.
GONE = (
    "%s is gone, with %s: it was deleted, renamed or unmounted during the run. It is made "
    "again, for the next ones."
)


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """`"did you mean 'tensor'? "` if one of the words is close, else nothing."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def comma_list(items: Iterable[Any]) -> str:
    """`a, b, c`."""
    return ", ".join(map(str, items))


def count_devices(count: int) -> str:
    """A number of devices: `1 device`, `8 devices`."""
    return f"{count} device" + "s" * (count != 1)


def format_mesh(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh's axes: `data=2, fsdp=4`."""
    return comma_list(f"{axis}={size}" for axis, size in sizes.items()) or "one device"


def first_few(items: Sequence[str], joint: str = ", ") -> str:
    """The first few items, and how many more there are: `a, b, c, d, and 3 more`."""
    more = f"{joint}and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return joint.join(items[:_SHOWN]) + more


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples on both sides of a size that is not one: `"96 or 104"`."""
    below, above = size // factor * factor, -(-size // factor) * factor
    return f"{below} or {above}" if below else f"{above}"


def say(text: str, file: Any = None) -> None:
    """Print text, on a terminal in lines that break between words.

    Commands in backquotes stay on one line, to be copied.

    **Arguments:**

    - `text`: what to print.
    - `file`: where, on stdout by default.
    """
    file = sys.stdout if file is None else file
    if file.isatty():
        kept = re.sub("`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
        columns = shutil.get_terminal_size().columns
        fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
        lines = (fill(line, columns) for line in kept.splitlines())
        text = "\n".join(lines).replace("\0", " ")
    print(text, file=file)


def format_bytes(size: int | float) -> str:
    """Bytes in the unit that fits: `12.35 GB`, `411 MB`, `14 B`."""
    for unit, each in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= 0.9995 * each:
            part = size / each
            digits = max(3 - len(f"{abs(part):.0f}"), 0) if unit != "GB" else 2
            return f"{part:,.{digits}f} {unit}"
    return f"{size:,.0f} B"
