"""The batches of a run: one for each step, or those of many steps in one dispatch."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from jaxtyping import PyTree

from ..data._loader import Loader
from ..training._eval_step import EvalStep
from ..training._metrics import Metrics
from ..training._states import step_of
from ..training._train_step import TrainStep
from ._callbacks import CallbackList
from ._protocols import Batches
from ._run import Run
from ._schedule import Schedule

#: The number of steps of a dispatch, and their batch, or batches.
Chunk = tuple[int, PyTree]


def chunks_of(
    run: Run, train_step: Any, schedule: Schedule, callbacks: CallbackList
) -> Generator[Chunk, None, None]:
    """The batches of a run in order, such that nothing is due within a chunk."""
    run.loader.seek(run.step)
    if is_resident(run.loader, train_step):
        return _resident_chunks(run, run.loader, schedule, callbacks)
    return _single_batches(run, schedule.last)


def taker_of(run: Run, train_step: Any) -> Callable[..., tuple[PyTree, Metrics]]:
    """What takes the steps of a chunk, given the state and the batch, or batches."""
    if is_resident(run.loader, train_step):
        return train_step.many
    if isinstance(train_step, TrainStep):
        return train_step
    return _checked_once(train_step, run.first)


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


def _single_batches(run: Run, last: int) -> Generator[Chunk, None, None]:
    with closing_iterator(run.loader) as batches:
        for batch in batches:
            yield 1, batch
    raise ValueError(
        f"the loader ended after step {run.step}, before step {last}; take fewer "
        "steps, or make one that goes on, such as Loader with epochs=None."
    )


def _resident_chunks(
    run: Run, loader: Any, schedule: Schedule, callbacks: CallbackList
) -> Generator[Chunk, None, None]:
    while True:
        step = run.step
        count = schedule.steps_until_due(step)
        called = callbacks.next_step(step)
        if called is not None:
            count = min(count, called - step)
        yield count, loader.stacked(count, capacity=schedule.longest_chunk)


def _checked_once(train_step: Callable[..., Any], first: int) -> Callable[..., Any]:
    """The user's own step, whose first call is checked: it must count as `fit` does."""
    is_checked = False

    def take(state: PyTree, batch: PyTree, *extra: PyTree) -> Any:
        nonlocal is_checked
        state, metrics = train_step(state, batch, *extra)
        if not is_checked and step_of(state) != first + 1:
            raise ValueError(
                f"train_step went from step {first} to step {step_of(state)}; let it take "
                "one step for each batch."
            )
        is_checked = True
        return state, metrics

    return take
