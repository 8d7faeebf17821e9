"""What `fit` needs of trackers and loaders."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PyTree

from ._media import Value


@runtime_checkable
class Tracker(Protocol):
    """Receives what [`eqxshard.fit`][] reports, and shows or stores it."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Receive values by name, after a number of finished steps.

        They are numbers; and, if a callback or an evaluation of the run logs them,
        [`eqxshard.trackers.Image`][]s and [`eqxshard.trackers.Histogram`][]s.
        """
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Called once, when the run ends.

        If it did not finish, `error` is what ended it: a `KeyboardInterrupt` or a
        `SystemExit` if somebody stopped it.
        """
        ...


@runtime_checkable
class Batches(Protocol):
    """What [`eqxshard.fit`][] needs of a loader; [`eqxshard.Loader`][] is one.

    One with epochs also has `__len__`, the number of batches in an epoch.
    """

    def __iter__(self) -> Iterator[PyTree]:
        """The batches from the loader's position on; closed at the end if it can be."""
        ...

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0."""
        ...


def check_parts(loader: Any, trackers: Sequence[Any]) -> None:
    """Refuse loaders and trackers without the methods that `fit` calls."""
    if not isinstance(loader, Batches):
        raise TypeError(
            f"a {type(loader).__name__} is not a loader; make an eqxshard.Loader, or give "
            "an object with __iter__() and seek(step)."
        )
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise TypeError(
                f"a {type(tracker).__name__} is not a tracker; give an object with "
                "log(step, values) and close(error=None)."
            )
        try:
            inspect.signature(tracker.close).bind(None)
        except TypeError:
            # Known before the run, not at its end.
            raise TypeError(
                f"{type(tracker).__name__}.close takes no error; write it as "
                "close(self, error=None)."
            ) from None
