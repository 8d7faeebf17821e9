"""Phrases that error messages share."""

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """`"did you mean 'tensor'? "` if one of the words is close, else nothing."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def comma_list(items: Iterable[Any]) -> str:
    """`a, b, c`."""
    return ", ".join(map(str, items))


def nearest_multiples(size: int, factor: int) -> str:
    """The multiples on both sides of a size that is not one: `"96 or 104"`."""
    below, above = size // factor * factor, -(-size // factor) * factor
    return f"{below} or {above}" if below else f"{above}"
