"""The batches that `fit` reads for each dispatch, and the position that it saves."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PyTree

from .._errors import UsageError, UsageTypeError
from ..data._loader import Loader
from ..data._order import Steps
from ..training._eval_step import EvalStep
from ..training._train_step import TrainStep
from ._due import Schedule

#: For each dispatch, the number of its steps, and their batch, or batches.
Dispatches = Generator[tuple[int, PyTree], None, None]


@runtime_checkable
class Batches(Protocol):
    """The methods that [`eqxshard.fit`][] calls; [`eqxshard.Loader`][] has them.

    A loader with epochs also has `__len__`, the number of batches in an epoch.
    """

    def __iter__(self) -> Iterator[PyTree]:
        """The batches from the loader's position on; a generator is closed at the end."""
        ...

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0."""
        ...


def check_loader(loader: Any) -> None:
    """Refuse a loader without the methods that `fit` calls."""
    if not isinstance(loader, Batches):
        raise UsageTypeError(
            f"a {type(loader).__name__} is not a loader; make an eqxshard.Loader, or give "
            "an object with __iter__() and seek(step)."
        )


def read_from_start(loader: Batches) -> AbstractContextManager[None]:
    """Move a loader to its start for a `with` block, and back at the end."""
    if isinstance(loader, Loader):
        return loader.from_start()
    # A loader of the user's own has no position that we could go back to.
    loader.seek(0)
    return nullcontext()


@dataclass(frozen=True)
class Position:
    """The position of the loader of `fit` after some steps, of one batch each.

    The loader itself may be elsewhere: it may have given the batch of a step that failed,
    or batches to a callback.

    - `loader`: a loader with `state` and, if it can be restored, `restore`.
    - `step`: the number of steps taken.
    """

    loader: Any
    step: int

    @staticmethod
    def of(loader: Any, step: int) -> "Position | None":
        """The position of a loader, for a checkpointer; `None` if it has no `state`."""
        return Position(loader, step) if hasattr(loader, "state") else None

    def state(self) -> dict[str, Any]:
        """The state of the loader before the batch of the next step."""
        if isinstance(self.loader, Loader):
            return self.loader.state(self.step)
        return {**self.loader.state(), "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Check that a saved state is of the same batches, and move the loader there."""
        saved = state.get("step", self.step)
        if saved != self.step:
            raise UsageError(
                f"the checkpoint of step {self.step} was saved when its loader had given "
                f"{saved} batches, and fit reads one batch for each step; go on with a "
                "loop of your own, like the one that saved it, or give fit a checkpointer "
                f"with another directory, to go on with the batch of step {self.step}."
            )
        if hasattr(self.loader, "restore"):
            self.loader.restore(state)


def steps_of(loader: Any) -> Steps | None:
    """The epoch that each step of a loader is in; `None` if it has no epochs."""
    if isinstance(loader, Loader):
        return loader.steps
    # `Steps` counts examples: as if each batch were one.
    return Steps(1, len(loader)) if isinstance(loader, Sized) else None


def is_resident(loader: Batches, step: Any) -> bool:
    """True if a loader's dataset is on the devices, and the step can gather from it."""
    steps = isinstance(step, TrainStep | EvalStep)
    return isinstance(loader, Loader) and loader.placement == "device" and steps


def dispatches_of(
    train_step: Any, loader: Batches, first: int, schedule: Schedule
) -> tuple[Callable[..., Any], Dispatches]:
    """The function that takes the steps of a dispatch, and the dispatches of a run.

    If the dataset is on the devices, all steps until something is due are one dispatch.

    **Arguments:**

    - `train_step`, `loader`: as for `fit`.
    - `first`: the step that the run starts from.
    - `schedule`: the schedule of the run.
    """
    loader.seek(first)
    if is_resident(loader, train_step):
        return train_step.many, _resident_batches(loader, first, schedule)
    return train_step, _single_batches(loader, schedule.last)


def _single_batches(loader: Batches, last: int) -> Dispatches:
    yield from ((1, batch) for batch in loader)
    raise UsageError(
        f"the loader ended before step {last}; take fewer steps, or make a loader that "
        "goes on: without epochs=, or of a dataset after .repeat()."
    )


def _resident_batches(loader: Any, step: int, schedule: Schedule) -> Dispatches:
    while True:
        count = schedule.steps_until_due(step)
        # A callback may have read from the loader.
        loader.seek(step)
        yield count, loader.stacked(count, capacity=schedule.longest_chunk)
        step += count
