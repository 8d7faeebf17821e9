"""One process finds something, or raises an error, and all of them do.

Elsewhere in this room an error is an exception. It is JSON only here, on its way to the
other processes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._errors import UsageError, UsageFileError, UsageOSError
from ..distributed import allgather_json, broadcast_from_first, is_main_process
from ._arrays import DamageError

_T = TypeVar("_T")

#: The errors that stay of their type; any other becomes an `OSError`, because packages for
#: object stores have errors of their own.
_KINDS: tuple[type[Exception], ...] = (
    DamageError,
    UsageFileError,
    UsageOSError,
    UsageError,
    OSError,
)


def reason(error: Exception) -> str:
    """What an error of a file system says."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def on_first(fn: Callable[[], _T]) -> _T:
    """Call a function in process 0. What it returns, in JSON, or raises, all do."""
    return value_of(broadcast_from_first(attempt(fn) if is_main_process() else None))


def on_all(fn: Callable[[], _T]) -> _T:
    """Call a function in every process; what one of them raises, all do.

    An error of another kind than damage goes before it.
    """
    if jax.process_count() == 1:
        return fn()
    found: list[_T] = []
    everyone = allgather_json(attempt(lambda: found.append(fn())))
    failed = [
        [kind, f"process {process}: {said}"]
        for process, (kind, said) in enumerate(everyone)
        if kind is not None
    ]
    for outcome in sorted(failed, key=lambda each: each[0] == DamageError.__name__):
        value_of(outcome)
    return found[0]


def attempt(fn: Callable[[], Any]) -> list[Any]:
    """Call a function; for `value_of`, what it returns or raises, in JSON."""
    try:
        return [None, fn()]
    except Exception as error:
        kinds = (kind for kind in _KINDS if isinstance(error, kind))
        return [next(kinds, OSError).__name__, reason(error)]


def value_of(outcome: list[Any]) -> Any:
    """The value that a process told, or its error, raised."""
    kind, value = outcome
    if kind is not None:
        raise next(each for each in _KINDS if each.__name__ == kind)(value)
    return value
