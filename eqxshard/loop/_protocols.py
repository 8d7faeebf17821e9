"""What `fit` needs of trackers and loaders."""

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

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

    def close(self) -> None:
        """Called once, when the run ends."""
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
