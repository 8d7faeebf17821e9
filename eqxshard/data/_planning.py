"""Planning: a script runs for the shapes of what it would train on, and not for the values.

Datasets that this library can download are then replaced by zeros of their shapes.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("eqxshard_planning", default=None)


@contextlib.contextmanager
def planning() -> Iterator[list[str]]:
    """Plan what runs inside; yields a list of what is to be known of the plan."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def is_planning() -> bool:
    """Whether only shapes matter."""
    return _notes.get() is not None


def add_note(text: str) -> None:
    """Say something of the plan that is being made."""
    notes = _notes.get()
    assert notes is not None
    notes.append(text)
