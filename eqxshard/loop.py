"""The loop: batches in order, a bounded number of steps in flight, logs in between."""

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Protocol, runtime_checkable

from jaxtyping import PyTree

from .metrics import Metrics
from .state import TrainState, with_state


@runtime_checkable
class Tracker(Protocol):
    """Takes what [`eqxshard.fit`][] reports, and shows it or keeps it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values after a number of finished steps."""
        ...

    def close(self) -> None:
        """Take it that there will be no more."""
        ...


@runtime_checkable
class Batches(Protocol):
    """What [`eqxshard.fit`][] needs of a loader; [`eqxshard.Loader`][] is one."""

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        ...

    def __iter__(self) -> Generator[PyTree, None, None]:
        """The batches from here on, until it is closed."""
        ...

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0."""
        ...


def fit(
    state: TrainState,
    train_step: Callable[[TrainState, PyTree], tuple[TrainState, Metrics]],
    loader: Batches,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None,
    trackers: Sequence[Tracker] = (),
    log_every: int = 50,
) -> TrainState:
    """Train until a number of steps or epochs is reached.

    Each step's batch is a function of the step's number, so that a state from the middle
    of a run goes on as if nothing had happened. At most two steps are in flight, and a
    device value is read only to log it, after the next step is under way.

    **Arguments:**

    - `state`: from [`eqxshard.init_state`][], or an earlier `fit`. Donated.
    - `train_step`: from [`eqxshard.make_train_step`][].
    - `loader`: an [`eqxshard.Loader`][].
    - `steps`, `epochs`: where to stop, counted from step 0 (not from `state.step`).
        Give one of the two.
    - `evaluate`: called with the model after each epoch and at the end (with the pair
        `(model, state)` if the model has state); returns metrics.
    - `trackers`: get `train/...` metrics, means over the examples since the last report,
        and `eval/...` metrics. They are closed at the end, whatever happens.
    - `log_every`: report every so many steps, and at the end of each epoch.

    **Returns:**

    The state at the end.

    **Raises:**

    `ValueError` if not exactly one of `steps` and `epochs` is given, or one of the
    numbers is not positive.

    !!! Example

        ```python
        state = eqxshard.fit(
            state,
            train_step,
            loader,
            epochs=10,
            evaluate=lambda model: eqxshard.evaluate(model, eval_step, test_loader),
            trackers=[eqxshard.trackers.JSONLines("metrics.jsonl")],
        )
        ```
    """
    with ExitStack() as stack:
        for tracker in trackers:
            stack.enter_context(closing(tracker))
        length = len(loader)
        stop = _last_step(steps, epochs, log_every, length)
        first = int(state.step)
        loader.seek(first)
        batches = stack.enter_context(closing(iter(loader)))
        report = _Report(trackers, length)
        # If a step fails, what is due of those before it is reported all the same.
        stack.callback(report.flush)
        for step in range(first + 1, stop + 1):
            batch = next(batches, None)
            if batch is None:
                raise ValueError(
                    f"the loader ended after step {step - 1}, before step {stop}; make it "
                    "with epochs=None, and let fit stop."
                )
            state, metrics = train_step(state, batch)
            # Now that this step is under way, the values of the one before can be read
            # without leaving the devices idle.
            report.flush()
            ends = step % length == 0 or step == stop
            report.add(step, metrics, due=ends or step % log_every == 0)
            if ends:
                report.flush()
                if evaluate is not None:
                    model = with_state(state.model, state.model_state)
                    report.evaluation(step, evaluate(model))
    return state


def _last_step(steps: int | None, epochs: int | None, log_every: int, length: int) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError("fit needs one of steps= and epochs=; give exactly one.")
    for name, value in (("steps", steps), ("epochs", epochs), ("log_every", log_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not a number of {name}; use 1 or more.")
    return steps if steps is not None else (epochs or 0) * length


def evaluate(
    model: PyTree, eval_step: Callable[[PyTree, PyTree], Metrics], loader: Batches
) -> dict[str, float]:
    """Measure a model over a whole dataset, each example counted exactly once.

    **Arguments:**

    - `model`: not donated.
    - `eval_step`: from [`eqxshard.make_eval_step`][].
    - `loader`: an [`eqxshard.Loader`][], of which one epoch is read from its start (so
        give another than the one that training reads).

    **Returns:**

    The mean of each metric over all examples.
    """
    loader.seek(0)
    with closing(iter(loader)) as batches:
        parts = [
            eval_step(model, batch) for batch in itertools.islice(batches, len(loader))
        ]
    return Metrics.stack(parts).compute()


class _Report:
    """Collects the metrics of steps on device, and hands their means to the trackers."""

    def __init__(self, trackers: Sequence[Tracker], steps_per_epoch: int):
        self._trackers = trackers
        self._steps_per_epoch = steps_per_epoch
        self._parts: list[Metrics] = []
        self._due: int | None = None
        self._since = time.perf_counter()

    def add(self, step: int, metrics: Metrics, *, due: bool) -> None:
        self._parts.append(metrics)
        self._due = step if due else None

    def flush(self) -> None:
        """Report what is due: wait for it, and start to measure anew."""
        if self._due is None:
            return
        metrics = Metrics.stack(self._parts)
        values = metrics.compute()
        now = time.perf_counter()
        seconds = now - self._since
        examples = float(metrics.weight.sum())
        self._log(
            self._due,
            "train",
            {**values, "seconds": seconds, "examples_per_second": examples / seconds},
        )
        self._parts, self._due, self._since = [], None, now

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(
                f"evaluate returned a {type(values).__name__}; return a dict of metrics."
            )
        self._log(step, "eval", values)
        # Training time is measured without the evaluation.
        self._since = time.perf_counter()

    def _log(self, step: int, prefix: str, values: Mapping[str, float]) -> None:
        named = {f"{prefix}/{name}": value for name, value in values.items()}
        for tracker in self._trackers:
            tracker.log(step, {"epoch": step / self._steps_per_epoch, **named})
