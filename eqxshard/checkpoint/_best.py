"""Which value of a metric is best: the smallest or the largest, and of equals the first."""

import re
from collections.abc import Mapping
from typing import Literal

from .._errors import UsageError
from ..sharding._text import did_you_mean

Mode = Literal["min", "max"]

#: The last words of metrics that everybody wants small, or large.
_SMALL, _LARGE = ("loss", "error", "perplexity"), ("accuracy", "acc")


def best_mode(metric: str, mode: Mode | None) -> Mode:
    """The mode that was given for a metric, or the one that its name leaves no doubt of.

    **Raises:**

    `ValueError` if the mode is not known, or has to be said.
    """
    if mode in ("min", "max"):
        return mode
    if mode is not None:
        raise UsageError(f"mode={mode!r} is not a mode; use 'min' or 'max'.")
    word = re.split(r"[^a-z]+", metric.lower())[-1]
    if word in _SMALL:
        return "min"
    if word in _LARGE:
        return "max"
    hint = did_you_mean(word, (*_SMALL, *_LARGE), 0.75)
    hint = hint.replace("'", f"'{metric.removesuffix(word)}", 1)
    say = f"{hint}Otherwise say" if hint else "say"
    raise UsageError(
        f"the name {metric} leaves open whether small or large is best; {say} mode='min' "
        "or mode='max'."
    )


def best_of(values: Mapping[int, float], mode: Mode) -> int | None:
    """The step with the best value; of equals, the first; `None` of no values."""
    sign = 1 if mode == "max" else -1
    return max(values, key=lambda step: (sign * values[step], -step), default=None)
