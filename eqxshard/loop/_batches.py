"""The batches of a run: one for each step, or those of many steps in one dispatch."""

from collections.abc import Callable, Generator, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

from jaxtyping import PyTree

from ..data._loader import Loader
from ..data._steps import Steps
from ..training._eval_step import EvalStep
from ..training._train_step import TrainStep
from ._schedule import Schedule

#: For each dispatch, the number of its steps, and their batch, or batches.
Dispatches = Generator[tuple[int, PyTree], None, None]


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


def check_loader(loader: Any) -> None:
    """Refuse a loader without the methods that `fit` calls."""
    if not isinstance(loader, Batches):
        raise TypeError(
            f"a {type(loader).__name__} is not a loader; make an eqxshard.Loader, or give "
            "an object with __iter__() and seek(step)."
        )


def steps_of(loader: Any) -> Steps | None:
    """Which epoch each step of a loader is in; `None` if it has no epochs."""
    if isinstance(loader, Loader):
        return loader.steps
    # As of batches of one row.
    return Steps.of(1, len(loader)) if isinstance(loader, Sized) else None


def is_resident(loader: Batches, step: Any) -> bool:
    """Whether a loader's dataset is on the devices, and the step can gather from it."""
    steps = isinstance(step, TrainStep | EvalStep)
    return isinstance(loader, Loader) and loader.placement == "device" and steps


def dispatches_of(
    train_step: Any, loader: Batches, first: int, schedule: Schedule
) -> tuple[Callable[..., Any], Dispatches]:
    """What takes the steps of a dispatch, and the dispatches of a run.

    From a dataset on the devices, all steps until something is due are one dispatch.

    **Arguments:**

    - `train_step`, `loader`: as for `fit`.
    - `first`: the step that the run starts from.
    - `schedule`: of the run.
    """
    loader.seek(first)
    if is_resident(loader, train_step):
        return train_step.many, _resident_batches(loader, first, schedule)
    return train_step, _single_batches(loader, schedule.last)


def _single_batches(loader: Batches, last: int) -> Dispatches:
    yield from ((1, batch) for batch in loader)
    raise ValueError(
        f"the loader ended before step {last}; take fewer steps, or make one that goes on, "
        "such as Loader with epochs=None."
    )


def _resident_batches(loader: Any, step: int, schedule: Schedule) -> Dispatches:
    while True:
        count = schedule.steps_until_due(step)
        yield count, loader.stacked(count, capacity=schedule.longest_chunk)
        step += count
