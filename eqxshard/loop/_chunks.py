"""The steps of a run: one at a time, or many in one dispatch from a resident dataset."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from jaxtyping import PyTree

from ..data._loader import Loader
from ..training._eval_step import EvalStep
from ..training._metrics import Metrics
from ..training._states import step_of
from ..training._train_step import TrainStep
from ._protocols import Batches
from ._schedule import Schedule
from ._watchdog import Watchdog


class Chunk(NamedTuple):
    """Some steps that are dispatched at once.

    - `last`: the number of the last one.
    - `steps`: how many there are.
    - `take`: takes them, given the state, and the `extra` if there is one.
    """

    last: int
    steps: int
    take: Callable[..., tuple[PyTree, Metrics]]


def chunks_of(
    loader: Batches, train_step: Any, schedule: Schedule, watchdog: Watchdog
) -> Generator[Chunk, None, None]:
    """The steps of a run, in order."""
    loader.seek(schedule.first)
    if is_resident(loader, train_step):
        return _resident_chunks(loader, train_step, schedule, watchdog)
    return _single_steps(loader, train_step, schedule, watchdog)


@contextmanager
def closing_iterator(loader: Batches) -> Iterator[Iterator[PyTree]]:
    """The iterator of a loader, closed at the end if it can be."""
    batches = iter(loader)
    try:
        yield batches
    finally:
        getattr(batches, "close", lambda: None)()


def is_resident(loader: Batches, step: Any) -> bool:
    """Whether a loader's dataset is on the devices, and the step can gather from it."""
    steps = isinstance(step, TrainStep | EvalStep)
    return isinstance(loader, Loader) and loader.placement == "device" and steps


def _single_steps(
    loader: Batches, train_step: Any, schedule: Schedule, watchdog: Watchdog
) -> Generator[Chunk, None, None]:
    with closing_iterator(loader) as batches:
        for step in range(schedule.first + 1, schedule.last + 1):
            watchdog.waits_for(f"the batch of step {step}")
            batch = next(batches, None)
            if batch is None:
                raise ValueError(
                    f"the loader ended after step {step - 1}, before step "
                    f"{schedule.last}; take fewer steps, or make one that goes on, such as "
                    "Loader with epochs=None."
                )
            watchdog.waits_for(f"step {step}")
            take = lambda s, *extra, batch=batch: train_step(s, batch, *extra)  # noqa: E731
            if step == schedule.first + 1 and not isinstance(train_step, TrainStep):
                take = _counted(take, step)
            yield Chunk(step, 1, take)


def _resident_chunks(
    loader: Any, train_step: TrainStep, schedule: Schedule, watchdog: Watchdog
) -> Generator[Chunk, None, None]:
    step = schedule.first
    while step < schedule.last:
        count = schedule.chunk_after(step)
        batches: PyTree = loader.stacked(count, capacity=schedule.longest_chunk)
        step += count
        watchdog.waits_for(f"step {step}")
        take = lambda s, *extra, b=batches: train_step.many(s, b, *extra)  # noqa: E731
        yield Chunk(step, count, take)


def _counted(take: Callable[..., Any], step: int) -> Callable[..., Any]:
    """The first call of the user's own step, which must count as `fit` does."""

    def take_and_check(state: PyTree, *extra: PyTree) -> Any:
        state, metrics = take(state, *extra)
        if step_of(state) != step:
            raise ValueError(
                f"train_step went from step {step - 1} to step {step_of(state)}; let it "
                "take one step for each batch."
            )
        return state, metrics

    return take_and_check
