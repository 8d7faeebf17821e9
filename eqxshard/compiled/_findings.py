"""The findings of lint, and their levels: a warning, an error or nothing."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from .._errors import UsageError
from ..distributed import is_main_process
from ..sharding._text import comma_list, did_you_mean, first_few

#: The kinds of findings in our own steps.
StepKind = Literal[
    "whole",
    "unmatched",
    "global-batch",
    "per-layer",
    "donation",
    "dtype",
    "callback",
    "constant",
]
#: The kinds of findings in any function, which the docstring of `lint` describes.
Kind = Literal[StepKind, "all-layers"]

KINDS: tuple[StepKind, ...] = get_args(StepKind)

_LEVELS = ("warn", "error", "off")

Level = Literal["warn", "error", "off"]
#: One level for all kinds of findings, or a level for some of them; the others warn.
Lint = Level | Mapping[str, Level]

#: The scope of the operations that a rewrite of ours adds, which users cannot change.
REWRITTEN = "eqxshard_rewrite"


class LintWarning(UserWarning):
    """A finding in a step that compiles for the first time."""


@dataclass(frozen=True)
class Finding:
    """Something in a compiled step that is most likely not meant.

    - `kind`: its kind, such as `constant`; the guide lists them.
    - `leaf`: the path of the array that it is about, if it is about one.
    - `line`: the line of your code that causes it, as `model.py:12`, if that is known.
    - `message`: a text that says what it is, and what to do.
    """

    kind: Kind
    leaf: str | None
    line: str | None
    message: str

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(f"{self.kind!r} is not a kind of finding; add it to `Kind`.")

    def __str__(self) -> str:
        return f"{self.line}: {self.message}" if self.line else self.message


def lint_levels(lint: Lint) -> Mapping[str, Level]:
    """The level of each kind; raise `ValueError` if a kind or a level does not exist."""
    given: Mapping[str, Level]
    given = lint if isinstance(lint, Mapping) else dict.fromkeys(KINDS, lint)
    for kind, level in given.items():
        if kind not in KINDS:
            raise UsageError(
                f"lint={lint!r}: {kind!r} is not a kind of finding; "
                f"{did_you_mean(kind, KINDS)}the kinds are {comma_list(KINDS)}."
            )
        if level not in _LEVELS:
            raise UsageError(
                f"lint={lint!r}: {level!r} is not a level; use 'warn', 'error' or 'off', "
                "or a mapping from kinds of findings to these."
            )
    return {kind: given.get(kind, "warn") for kind in KINDS}


def report(findings: Iterable[Finding], levels: Mapping[str, Level], where: str) -> None:
    """Raise `ValueError` for findings that are errors, and warn of the others.

    **Arguments:**

    - `findings`: the findings.
    - `levels`: the level of each kind, from `lint_levels`.
    - `where`: the name of the compiled step.
    """
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    for level in ("error", "warn"):
        for kind, found in by_kind.items():
            if levels[kind] != level:
                continue
            text = (
                f"{where}, {kind}: {first_few([*map(str, found)], ' ')} "
                f"(If this is intended, silence it with lint={{{kind!r}: 'off'}}.)"
            )
            if level == "error":
                raise UsageError(text)
            if is_main_process():
                warnings.warn(text, LintWarning, stacklevel=2)
