"""`fit`: batches in order, a bounded number of steps in flight, reports in between."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Literal

from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..distributed import assert_same_on_all_processes, is_main_process
from ..training._metrics import Metrics
from ..training._state import TrainState, with_state
from ._chunks import chunks_of
from ._give_up import give_up
from ._protocols import Batches, Tracker
from ._report import Report, tell
from ._schedule import Schedule, evaluation_interval, last_step
from ._signals import stop_signals
from ._watchdog import Watchdog


def fit(
    state: TrainState,
    train_step: Callable[[TrainState, PyTree], tuple[TrainState, Metrics]],
    loader: Batches,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None,
    evaluate_every: int | Literal["epoch"] = "epoch",
    checkpointer: Checkpointer | None = None,
    trackers: Sequence[Tracker] = (),
    log_every: int = 50,
    max_nonfinite: int = 10,
    stall_seconds: float | None = 300.0,
) -> TrainState:
    """Train until a number of steps or epochs is reached.

    Each step's batch is a function of the step's number, so a state from the middle of a
    run continues it as if nothing had happened. At most two steps are in flight, and
    metrics are read only to report them, while the next step runs. From a loader with
    `placement="device"`, all steps up to the next report or checkpoint are one dispatch.

    With a checkpointer, SIGTERM or SIGINT (Ctrl-C) end the run after the current step, or
    evaluation: the state is saved, and `SystemExit` for SIGTERM, or `KeyboardInterrupt`,
    is raised. A second signal ends the process at once. (With several processes, a signal
    to one ends all after the same step; a second one is up to whoever started them.)

    **Arguments:**

    - `state`: from [`eqxshard.init_state`][], or an earlier `fit`. Donated.
    - `train_step`: from [`eqxshard.make_train_step`][].
    - `loader`: an [`eqxshard.Loader`][].
    - `steps`, `epochs`: when to stop, counted from step 0 (not from `state.step`). Give
        one of the two.
    - `evaluate`: called with the model (with the pair `(model, state)` if the model has
        state); returns metrics.
    - `evaluate_every`: the number of steps between evaluations, or `"epoch"`. There is
        also one at the end.
    - `checkpointer`: saves the state from time to time, after an evaluation that is the
        best so far (if it has `best`), and at the end. To resume, pass the state that
        [`eqxshard.Checkpointer.restore`][] returns.
    - `trackers`: receive `train/...` metrics, means over the examples since the last
        report, and `eval/...` metrics. They are closed at the end, whatever happens.
    - `log_every`: the number of steps between reports. There is also one at the end of
        each epoch, after each evaluation and whenever a checkpoint is saved.
    - `max_nonfinite`: give up after this many steps in a row that were skipped because
        their loss or gradients were not finite. The state and the batch are written to
        the folder `crash_dump` in the checkpointer's, for `python -m eqxshard.replay`.
    - `stall_seconds`: log an error, with the stacks of all threads, if the run waits
        longer than this for a batch, a step (including compilation), an evaluation or a
        checkpoint; `None` for never.

    **Returns:**

    The state at the end.

    **Raises:**

    `ValueError` unless exactly one of `steps` and `epochs` is given, if one of the
    numbers is not positive, or if the checkpointer's directory holds another run.
    `TypeError` if the loader or a tracker lacks a method. `FloatingPointError` after
    `max_nonfinite` skipped steps. `OSError` if the last checkpoint could not be written.

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
    _check_parts(loader, trackers)
    with ExitStack() as stack:
        for tracker in trackers:
            stack.callback(tell, tracker.close)
        epoch = len(loader)
        first = int(state.step)
        last = last_step(steps, epochs, log_every, max_nonfinite, epoch)
        between = evaluation_interval(evaluate_every, epoch)
        watchdog = stack.enter_context(Watchdog(stall_seconds))
        facts = {"step": first, "stop": last, "log_every": log_every}
        facts |= {"evaluates": evaluate is not None, "evaluate_every": between}
        facts |= {"max_nonfinite": max_nonfinite}
        assert_same_on_all_processes("fit", facts | {"saves": checkpointer is not None})
        if checkpointer is not None:
            checkpointer.claim_run(first, loader)
            # Whatever ends the run, the save in progress is finished.
            stack.callback(checkpointer.close)
        stop = stack.enter_context(stop_signals(can_save=checkpointer is not None))
        schedule = Schedule(first, last, epoch, between, log_every, checkpointer, stop)
        report = Report(trackers if is_main_process() else (), epoch, max_nonfinite)
        # If a step fails, what is due for earlier ones is still reported.
        stack.callback(report.flush)
        chunks = chunks_of(loader, train_step, schedule, watchdog)
        for step, count, take in stack.enter_context(closing(chunks)):
            state, metrics = take(state)
            # Reads the metrics of earlier steps, while this one runs.
            report.flush()
            due = schedule.after(step)
            report.add(step, metrics, count, due=due.report)
            if due.evaluate or due.save:
                report.read()
            if due.evaluate and evaluate is not None:
                watchdog.waits_for(f"the evaluation after step {step}")
                model = with_state(state.model, state.model_state)
                report.add_evaluation(evaluate(model))
            if due.evaluate or due.save:
                report.flush()
            if report.too_many_nonfinite:
                nonfinite = report.too_many_nonfinite
                give_up(state, train_step, loader, nonfinite, checkpointer)
            best = due.evaluate and checkpointer and checkpointer.is_best(report.last)
            if checkpointer is not None and (due.save or best):
                watchdog.waits_for(f"the checkpoint of step {step}")
                checkpointer.save(state, loader=loader, metrics=report.last)
                # Exclude save time from throughput.
                report.restart_clock()
            if due.leave:
                stop.leave(step, checkpointer)
        if checkpointer is not None:
            watchdog.waits_for("the last checkpoint to be written")
            checkpointer.wait()
    return state


def _check_parts(loader: Any, trackers: Sequence[Any]) -> None:
    """Refuse loaders and trackers without the methods that `fit` calls."""
    if not isinstance(loader, Batches):
        raise TypeError(
            f"a {type(loader).__name__} is not a loader; make an eqxshard.Loader, or give "
            "an object with __len__(), __iter__() and seek(step)."
        )
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise TypeError(
                f"a {type(tracker).__name__} is not a tracker; give an object with "
                "log(step, values) and close()."
            )
