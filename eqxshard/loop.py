"""The loop: batches in order, a bounded number of steps in flight, logs in between."""

import itertools
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NoReturn, Protocol, cast, runtime_checkable

import jax
import numpy as np
from jaxtyping import PyTree

from ._black_box import write_black_box
from ._signals import stop_signals
from ._watchdog import Watchdog
from .checkpoint import Checkpointer
from .data import Loader
from .distributed import agree, is_first
from .metrics import Metrics
from .state import TrainState, with_state
from .step import EvalStep, TrainStep

_LOG = logging.getLogger(__name__)


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
    checkpointer: Checkpointer | None = None,
    trackers: Sequence[Tracker] = (),
    log_every: int = 50,
    max_nonfinite: int = 10,
    stall_seconds: float | None = 300.0,
) -> TrainState:
    """Train until a number of steps or epochs is reached.

    Each step's batch is a function of the step's number, so that a state from the middle
    of a run goes on as if nothing had happened. At most two steps are in flight, and a
    device value is read only to log it, after the next step is under way. From a loader
    with `placement="device"`, all the steps up to the next report or checkpoint are taken
    in one dispatch.

    With a checkpointer, SIGTERM or SIGINT (Ctrl-C) end the run after the step, or the
    evaluation, that is under way: the state is saved, and `KeyboardInterrupt`, or
    `SystemExit` for SIGTERM, is raised. A second signal ends the process at once. (Of
    several processes, a signal to one ends all after the same step; a second one is for
    who started them.)

    **Arguments:**

    - `state`: from [`eqxshard.init_state`][], or an earlier `fit`. Donated.
    - `train_step`: from [`eqxshard.make_train_step`][].
    - `loader`: an [`eqxshard.Loader`][].
    - `steps`, `epochs`: where to stop, counted from step 0 (not from `state.step`).
        Give one of the two.
    - `evaluate`: called with the model after each epoch and at the end (with the pair
        `(model, state)` if the model has state); returns metrics.
    - `checkpointer`: saves the state when it is due, and at the end. The state that a run
        goes on from is read by [`eqxshard.Checkpointer.restore`][].
    - `trackers`: get `train/...` metrics, means over the examples since the last report,
        and `eval/...` metrics. They are closed at the end, whatever happens.
    - `log_every`: report every so many steps, at the end of each epoch, and where a
        checkpoint is saved.
    - `max_nonfinite`: give up when so many steps in a row were skipped because their loss
        or gradients were not finite. The state, the batch and the loss function are then
        written into a folder `black_box` in the checkpointer's, for
        `python -m eqxshard.replay`.
    - `stall_seconds`: log an error, with the stacks of all threads, when the run waits for
        a batch, a step, an evaluation or a checkpoint for longer than this (compilation
        counts); `None` for never.

    **Returns:**

    The state at the end.

    **Raises:**

    `ValueError` if not exactly one of `steps` and `epochs` is given, one of the numbers
    is not positive, or the checkpointer's directory has another run's checkpoints.
    `FloatingPointError` after `max_nonfinite` skipped steps. `OSError` if the last
    checkpoint could not be written.

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
            stack.callback(_tell, tracker.close)
        if stall_seconds is not None and not stall_seconds > 0:
            raise ValueError(
                f"stall_seconds={stall_seconds} is no time; use more than 0, or None."
            )
        length = len(loader)
        stop = _last_step(steps, epochs, log_every, max_nonfinite, length)
        first = int(state.step)
        alike = {"step": first, "stop": stop, "log_every": log_every}
        alike |= {"max_nonfinite": max_nonfinite, "evaluates": evaluate is not None}
        watchdog = stack.enter_context(Watchdog(stall_seconds))
        agree("fit", alike | {"saves": checkpointer is not None})
        asked = None
        if checkpointer is not None:
            checkpointer.check_start(first, loader)
            # Whatever ends the run, what was being saved is written first.
            stack.callback(checkpointer.close)
        if checkpointer is not None or jax.process_count() > 1:
            asked = stack.enter_context(stop_signals())
        loader.seek(first)
        batches = stack.enter_context(closing(iter(loader)))
        # What is written once is written by one process.
        report = _Report(trackers if is_first() else (), length, max_nonfinite)
        # If a step fails, what is due of those before it is reported all the same.
        stack.callback(report.flush)
        device_loader = _on_device(loader, train_step, TrainStep)
        every = None if checkpointer is None else checkpointer.every
        periods = [n for n in (length, log_every, every) if n is not None]
        step = first
        while step < stop:
            watchdog.waits_for(f"the batch of step {step + 1}")
            if device_loader is not None:
                count = min(stop - step, *(n - step % n for n in periods))
                batch = device_loader.stacked(count, room=min(periods))
                take = cast(TrainStep, train_step).many
            else:
                count, batch, take = 1, next(batches, None), train_step
            if batch is None:
                raise ValueError(
                    f"the loader ended after step {step}, before step {stop}; make it "
                    "with epochs=None, and let fit stop."
                )
            step += count
            watchdog.waits_for(f"step {step}")
            state, metrics = take(state, batch)
            # Now that this step is under way, the values of the one before can be read
            # without leaving the devices idle.
            report.flush()
            ends = step % length == 0 or step == stop
            reports = ends or step % log_every == 0
            leaves = asked is not None and asked.asked(step)
            saves = checkpointer is not None and (
                leaves or step == stop or checkpointer.due(step, reporting=reports)
            )
            report.add(step, metrics, count, due=reports or saves)
            if ends or saves:
                report.read()
            if ends and evaluate is not None:
                watchdog.waits_for(f"the evaluation after step {step}")
                model = with_state(state.model, state.model_state)
                report.evaluation(evaluate(model))
            if ends or saves:
                report.flush()
            if report.failed:
                _give_up(state, train_step, loader, report.failed, checkpointer)
            if saves and checkpointer is not None:
                watchdog.waits_for(f"the checkpoint of step {step}")
                checkpointer.save(state, loader=loader, metrics=report.last)
                # What this took is no training, as an evaluation is none.
                report.restart()
            if leaves and asked is not None:
                saved = None
                if checkpointer is not None:
                    checkpointer.wait()
                    saved = checkpointer.steps()[-1:]
                asked.leave(step, saved)
        if checkpointer is not None:
            watchdog.waits_for("the last checkpoint to be written")
            checkpointer.wait()
    return state


def _last_step(
    steps: int | None, epochs: int | None, log_every: int, max_nonfinite: int, length: int
) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError("fit needs one of steps= and epochs=; give exactly one.")
    numbers = {"steps": steps, "epochs": epochs, "log_every": log_every}
    for name, value in (numbers | {"max_nonfinite": max_nonfinite}).items():
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
    device_loader = _on_device(loader, eval_step, EvalStep)
    if device_loader is not None:
        batches = device_loader.stacked(len(device_loader))
        return cast(EvalStep, eval_step).many(model, batches).compute()
    with closing(iter(loader)) as batches:
        parts = [
            eval_step(model, batch) for batch in itertools.islice(batches, len(loader))
        ]
    return Metrics.stack(parts).compute()


def _on_device(loader: Batches, step: Any, kind: type) -> Loader | None:
    """The loader, if its examples are on the devices and the step can gather them."""
    if isinstance(loader, Loader) and loader.placement == "device":
        return loader if isinstance(step, kind) else None
    return None


class _Report:
    """Collects the metrics of steps on device, and hands their means to the trackers."""

    def __init__(
        self, trackers: Sequence[Tracker], steps_per_epoch: int, max_nonfinite: int
    ):
        self._trackers = trackers
        self._steps_per_epoch = steps_per_epoch
        self._parts: list[Metrics] = []
        self._taken: list[np.ndarray] = []
        self._due: int | None = None
        self._values: dict[str, float] = {}
        self._since = time.perf_counter()
        #: What was reported last.
        self.last: dict[str, float] = {}
        #: The steps that were not finite, once there are too many in a row.
        self.failed: list[int] = []
        self._max_nonfinite = max_nonfinite
        self._in_a_row: list[int] = []

    def add(self, step: int, metrics: Metrics, count: int, *, due: bool) -> None:
        """Take the metrics of as many steps, for which there may be more room in them."""
        self._parts.append(metrics)
        self._taken.append(np.arange(metrics.weight.size) < count)
        self._due = step if due else None

    def read(self) -> None:
        """Wait for what is due, and stop to measure the time that it took."""
        if self._due is None or not self._parts:
            return
        taken = np.concatenate(self._taken)
        metrics = jax.tree.map(lambda leaf: leaf[taken], Metrics.stack(self._parts))
        values = metrics.compute()
        seconds = time.perf_counter() - self._since
        examples = float(metrics.weight.sum())
        speed = {"seconds": seconds, "examples_per_second": examples / seconds}
        self._values = _named("train", {**values, **speed})
        self._parts, self._taken = [], []
        first = self._due - len(metrics.nonfinite) + 1
        for step, failed in enumerate(metrics.nonfinite, start=first):
            self._in_a_row = [*self._in_a_row, step] if failed else []
            if len(self._in_a_row) >= self._max_nonfinite:
                self.failed = self._in_a_row

    def evaluation(self, values: Mapping[str, float]) -> None:
        if not isinstance(values, Mapping):
            raise TypeError(
                f"evaluate returned a {type(values).__name__}; return a dict of metrics."
            )
        self._values |= _named("eval", values)

    def flush(self) -> None:
        """Report what is due, and start to measure anew."""
        if self._due is None:
            return
        self.read()
        self.last = {"epoch": self._due / self._steps_per_epoch, **self._values}
        for tracker in self._trackers:
            _tell(tracker.log, self._due, self.last)
        self._values, self._due = {}, None
        self.restart()

    def restart(self) -> None:
        """Start to measure the time anew."""
        self._since = time.perf_counter()


def _tell(method: Callable[..., None], *args: Any) -> None:
    """Call a tracker: a full disk, or another fault of a file, does not end a run."""
    try:
        method(*args)
    except OSError as error:
        _LOG.error("a tracker failed: %s. The run goes on.", error)


def _named(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _give_up(
    state: TrainState,
    train_step: Any,
    loader: Batches,
    failed: Sequence[int],
    checkpointer: Checkpointer | None,
) -> NoReturn:
    says = (
        f"the loss or a gradient of {len(failed)} steps in a row, from step {failed[0]} "
        "on, was not finite"
    )
    if checkpointer is None:
        raise FloatingPointError(
            f"{says}; use a lower learning rate, or give fit a checkpointer to have what "
            "is needed to look for the cause written down."
        )
    loader.seek(failed[0] - 1)
    with closing(iter(loader)) as batches:
        batch = next(batches)
    folder = checkpointer.directory / "black_box"
    try:
        write_black_box(folder, state, failed, batch, train_step, loader)
    # Such as a full disk, or a loss function with something in it that cannot be written.
    except Exception as error:
        raise FloatingPointError(
            f"{says}; what is needed to look for the cause could not be written: {error}"
        ) from error
    raise FloatingPointError(
        f"{says}; look for the cause with `python -m eqxshard.replay {folder}`."
    )
