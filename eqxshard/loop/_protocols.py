"""What `fit` needs of trackers and loaders."""

from collections.abc import Generator, Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import PyTree


@runtime_checkable
class Tracker(Protocol):
    """Receives what [`eqxshard.fit`][] reports, and shows or stores it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive values by name, after a number of finished steps."""
        ...

    def close(self) -> None:
        """Called once, when the run ends."""
        ...


@runtime_checkable
class Batches(Protocol):
    """What [`eqxshard.fit`][] needs of a loader; [`eqxshard.Loader`][] is one.

    One with epochs also has `__len__`, the number of batches in an epoch.
    """

    def __iter__(self) -> Generator[PyTree, None, None]:
        """The batches from the loader's position on, until it is closed."""
        ...

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0."""
        ...
