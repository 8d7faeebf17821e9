"""Shares what one process finds in a folder, or its error, with all processes.

Elsewhere in this room an error is an exception; on its way to other processes it is JSON.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from .._errors import UsageError, UsageFileError, UsageOSError
from ..distributed import allgather_json, broadcast_from_first, is_main_process
from ._arrays import DamageError

_T = TypeVar("_T")

#: The errors that have the same type in all processes. Any other one is an `OSError` in
#: other processes: packages for object stores have errors of their own.
_KINDS: tuple[type[Exception], ...] = (
    DamageError,
    UsageFileError,
    UsageOSError,
    UsageError,
    OSError,
)


def reason(error: Exception) -> str:
    """The reason that an error of a file system gives."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def on_first(fn: Callable[[], _T]) -> _T:
    """Call a function in process 0; every process returns its value, or raises its error.

    The value must be JSON.
    """
    return share(attempt(fn) if is_main_process() else None).get()


def on_all(fn: Callable[[], _T]) -> _T:
    """Call a function in every process; if one raises an error, all raise one.

    Damage is raised only if there is no other error.
    """
    own = attempt(fn)
    everyone = allgather_json(own.told())
    if own.error is not None and not isinstance(own.error, DamageError | OSError):
        # A bug, or memory that ran out, keeps its traceback.
        raise own.error
    alone = len(everyone) == 1
    failed = [
        Outcome(error=_error(kind, said if alone else f"process {process}: {said}"))
        for process, (kind, said) in enumerate(everyone)
        if kind is not None
    ]
    for outcome in sorted(failed, key=lambda each: isinstance(each.error, DamageError)):
        outcome.get()
    return own.get()


class Outcome:
    """The value that a function returned, or the error that it raised."""

    def __init__(self, value: Any = None, error: Exception | None = None):
        self.value, self.error = value, error

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value

    def told(self) -> list[Any]:
        """The type and the reason of the error, for other processes; or two `None`s."""
        if self.error is None:
            return [None, None]
        kinds = (kind for kind in _KINDS if isinstance(self.error, kind))
        return [next(kinds, OSError).__name__, reason(self.error)]


def attempt(fn: Callable[[], Any]) -> Outcome:
    """Call a function, and keep its error."""
    try:
        return Outcome(fn())
    except Exception as error:
        return Outcome(error=error)


def share(outcome: Outcome | None) -> Outcome:
    """The outcome of process 0, in every process.

    **Arguments:**

    - `outcome`: that of process 0, where an error keeps its type and traceback; `None` in
        the others.
    """
    value, (kind, said) = broadcast_from_first(
        None if outcome is None else [outcome.value, outcome.told()]
    )
    if outcome is not None:
        return outcome
    return Outcome(value, None if kind is None else _error(kind, said))


def _error(kind: str, said: str) -> Exception:
    return next(each for each in _KINDS if each.__name__ == kind)(said)
