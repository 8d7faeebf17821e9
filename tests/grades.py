"""Marks cases of tests: quick, `slow`, or, for one more of many, `thorough`."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest


def graded(
    cases: Iterable[Any], quick: Collection[Any] = (), slow: Collection[Any] = ()
) -> list[Any]:
    """Mark the parameters of a test; those in neither collection are `thorough`."""

    def marked(case: Any) -> Any:
        marks = [] if case in quick else [mark(case)]
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=marks)

    def mark(case: Any) -> pytest.MarkDecorator:
        return pytest.mark.slow if case in slow else pytest.mark.thorough

    return [marked(case) for case in cases]


def on_versions(
    cases: Iterable[Any], some: Collection[Any], others: Collection[Any] = ()
) -> list[Any]:
    """Mark some parameters for other versions of JAX, too, and `others` as slow."""

    def marks(case: Any) -> Iterator[pytest.MarkDecorator]:
        if case in some:
            yield pytest.mark.versions
        elif case in others:
            yield pytest.mark.slow

    return [pytest.param(case, marks=[*marks(case)]) for case in cases]
