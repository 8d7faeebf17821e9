"""`fit`: batches in order, a bounded number of steps in flight, reports in between."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Literal, TypeVar

from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..distributed import assert_same_on_all_processes, is_main_process
from ..training._in_flight import InFlight
from ..training._metrics import Metrics
from ..training._states import map_models, step_of
from ._callbacks import Callback, CallbackList, check_callbacks
from ._chunks import chunks_of
from ._clock import Clock
from ._give_up import give_up
from ._protocols import Batches, Tracker
from ._report import Report, tell
from ._rescue import Rescue, save
from ._run import Run
from ._schedule import Due, Schedule, evaluation_interval, last_step, steps_per_epoch
from ._signals import Stop, announce_stop, stop_signals
from ._watchdog import Watchdog

_State = TypeVar("_State")


def fit(
    state: _State,
    train_step: Callable[..., tuple[_State, Metrics]],
    loader: Batches,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Callable[[PyTree], Mapping[str, Any]] | None = None,
    evaluate_every: int | Literal["epoch"] = "epoch",
    checkpointer: Checkpointer | None = None,
    trackers: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
    log_every: int = 50,
    max_nonfinite: int = 10,
    stall_seconds: float | None = 300.0,
    hang_seconds: float | None = None,
    extra: PyTree = None,
) -> _State:
    """Train until a number of steps or epochs is reached.

    Each step's batch is a function of the step's number, so a state from the middle of a
    run continues it as if nothing had happened. At most two steps are in flight, and
    metrics are read only to report them, while the next step runs. From a loader with
    `placement="device"`, all steps up to the next report or checkpoint are one dispatch.
    At the end, the main process prints where the wall time of the run went, on stderr.

    With a checkpointer, SIGTERM or SIGINT (Ctrl-C) end the run after the current step, or
    evaluation: the state is saved, and `SystemExit` for SIGTERM, or `KeyboardInterrupt`,
    is raised. A second signal ends the process at once. (With several processes, a signal
    to one ends all after the same step; a second one is up to whoever started them.)

    **Arguments:**

    - `state`: from [`eqxshard.init_state`][], or an earlier `fit`; or a PyTree of several
        that have taken the same number of steps, such as a dict with those of a GAN.
        Donated.
    - `train_step`: from [`eqxshard.make_train_step`][]; or a function of your own from
        the state (or states) and a batch to the new state and [`eqxshard.Metrics`][],
        which adds 1 to each state's `step`.
    - `loader`: an [`eqxshard.Loader`][], or another object with `seek(step)` and
        `__iter__`. Without `__len__` it has no epochs.
    - `steps`, `epochs`: when to stop, counted from step 0 (not from `state.step`). Give
        one of the two.
    - `evaluate`: called with the model (with the pair `(model, state)` if the model has
        state), or with a PyTree of those of several states; returns metrics.
    - `evaluate_every`: the number of steps between evaluations, or `"epoch"`. There is
        also one at the end.
    - `checkpointer`: saves the state from time to time, after an evaluation that is the
        best so far (if it has `best`), and at the end. To resume, pass the state that
        [`eqxshard.Checkpointer.restore`][] returns.
    - `trackers`: receive `train/...` metrics, means over the examples since the last
        report, `eval/...` metrics, `seconds/...`, how the time since then was spent, and
        `goodput`, the share of the run in which steps ran. They are closed at the end,
        whatever happens.
    - `callbacks`: [`eqxshard.callbacks.Callback`][]s, called in this order. They may stop
        the run, which then returns its state as at the end, but does not evaluate again.
    - `log_every`: the number of steps between reports. There is also one at the end of
        each epoch, after each evaluation and whenever a checkpoint is saved.
    - `max_nonfinite`: give up if this many steps in a row, or more, were skipped because
        their loss, gradients or update were not finite, and the last of a report's was
        one of them. The state and the batch are written to the folder `crash_dump` in the
        checkpointer's, for `python -m eqxshard.replay`.
    - `stall_seconds`: log an error, with the stacks of all threads, if the run waits
        longer than this for a batch, a step (including compilation), an evaluation or a
        checkpoint; `None` for never.
    - `hang_seconds`: end this process, with exit status 1, if one such wait takes longer
        than this, so that a launcher or scheduler starts the run again from its newest
        checkpoint; `None` for never. It must be longer than the longest compilation,
        evaluation or save, or the run ends there each time.
    - `extra`: given to each step, such as a teacher; see [`eqxshard.TrainStep`][]. A
        callback may replace it. It is not saved.

    **Returns:**

    The state at the end.

    **Raises:**

    `ValueError` unless exactly one of `steps` and `epochs` is given, if one of the
    numbers is not positive, or if the checkpointer's directory holds another run.
    `TypeError` if the loader or a tracker lacks a method. `FloatingPointError` after
    `max_nonfinite` skipped steps. `OSError` if the last checkpoint could not be written.
    And any error of the loader, `evaluate`, a callback or a tracker, once the state after
    the last step is saved. If it cannot be saved, or there is no checkpointer, the error
    has the state as its attribute `state`. (With several processes, an error in one of
    them ends all, and they cannot save together any more.)

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
    _check_parts(loader, trackers, callbacks)
    epoch = steps_per_epoch(loader)
    with ExitStack() as stack:
        # The last to leave: an error of a tracker that closes would lose the state, too.
        rescue = Rescue(checkpointer)
        stack.push(rescue.leave)
        report = Report(trackers if is_main_process() else (), epoch, max_nonfinite)
        clock = stack.enter_context(_closing_parts(report, trackers, callbacks))
        first = step_of(state)
        last = last_step(steps, epochs, log_every, max_nonfinite, epoch)
        between = evaluation_interval(evaluate_every, epoch, evaluates=evaluate is not None)
        watchdog = stack.enter_context(Watchdog(stall_seconds, hang_seconds))
        numbers = {"step": first, "stop": last, "log_every": log_every}
        numbers |= {"evaluate_every": between, "max_nonfinite": max_nonfinite}
        _assert_same(numbers, callbacks, checkpointer)
        run = Run(state, first, loader, report, checkpointer is not None, extra)
        # It would keep arrays alive that the first step copies.
        del state
        called = CallbackList(callbacks, run, watchdog)
        if checkpointer is not None:
            called.restore(checkpointer.claim_run(first, loader))
            # Whatever ends the run, the save in progress is finished.
            stack.callback(checkpointer.close)
            stack.callback(clock.enter, "checkpoint")
        stop = stack.enter_context(stop_signals(can_save=checkpointer is not None))
        schedule = Schedule(
            first, last, epoch, between, log_every, checkpointer, stop, called
        )
        rescue.watch(run, called)
        # If a step fails, the earlier ones are still reported.
        stack.callback(report.close)
        chunks = chunks_of(loader, train_step, schedule, watchdog)
        stack.enter_context(closing(chunks))
        # An error may come in any part.
        stack.callback(clock.enter, "other")
        in_flight = InFlight()
        clock.enter("data")
        for step, count, take in chunks:
            clock.enter("device")
            in_flight.make_room()
            clock.enter("dispatch")
            run._advance(step, count, *take(run.state, *run._extra))
            clock.enter("log")
            in_flight.add(run._metrics.weight)
            # Reads the metrics of earlier steps, while this one runs.
            report.flush()
            if step == called.next_step:
                called.after_step()
            due = _due_after(step, schedule, clock)
            report.add(step, run._metrics, count, due=due.report)
            if due.evaluate or due.save or (due.report and called.need_reports):
                report.read()
                if due.evaluate and evaluate is not None:
                    _evaluate(evaluate, run, called, watchdog)
                called.after("report")
                report.flush()
            if report.too_many_nonfinite:
                nonfinite = report.too_many_nonfinite
                give_up(run.state, train_step, loader, nonfinite, checkpointer, run._extra)
            asked = called.want_stop or called.want_save
            best = due.evaluate and checkpointer and checkpointer.is_best(report.values)
            if checkpointer is not None and (due.save or asked or best):
                watchdog.waits_for(f"the checkpoint of step {step}")
                save(run, called, checkpointer)
                called.after("save")
                # Exclude save time from throughput.
                report.restart_speed()
            if due.leave:
                clock.enter("checkpoint")
                stop.leave(step, checkpointer)
            if called.want_stop:
                clock.enter("checkpoint")
                announce_stop(f"stopped after step {step}: {run._why_stop}", checkpointer)
                break
            clock.enter("data")
        if checkpointer is not None:
            clock.enter("checkpoint")
            _finish_saving(checkpointer, run.step, stop, watchdog)
    return run.state


def _due_after(step: int, schedule: Schedule, clock: Clock) -> Due:
    """What is due after a step, which several processes may wait for to ask each other."""
    clock.enter("device")
    due = schedule.after(step)
    clock.enter("log")
    return due


def _evaluate(
    evaluate: Callable[[PyTree], Mapping[str, Any]],
    run: Run,
    called: CallbackList,
    watchdog: Watchdog,
) -> None:
    """Evaluate, and add the result to the report."""
    watchdog.waits_for(f"the evaluation after step {run.step}")
    run._report.clock.enter("evaluation")
    run._report.add_evaluation(evaluate(map_models(run.state)))
    run._report.clock.enter("log")
    called.after("evaluation")


def _finish_saving(
    checkpointer: Checkpointer, step: int, stop: Stop, watchdog: Watchdog
) -> None:
    """Wait for the last checkpoint, and leave if a signal came after the last step."""
    watchdog.waits_for("the last checkpoint to be written")
    checkpointer.wait()
    if stop.signal is not None:
        stop.leave(step, checkpointer)


@contextmanager
def _closing_parts(
    report: Report, trackers: Sequence[Tracker], callbacks: Sequence[Callback]
) -> Iterator[Clock]:
    """Close them at the end of a run, and tell where its time went."""
    with ExitStack() as stack:
        stack.enter_context(report.clock)
        # Below what trackers print when they close.
        stack.callback(report.print_time)
        for tracker in trackers:
            stack.callback(tell, tracker.close)
        stack.callback(report.clock.enter, "log")
        for callback in callbacks:
            stack.callback(callback.close)
        stack.callback(report.clock.enter, "callbacks")
        yield report.clock


def _assert_same(
    numbers: dict[str, Any],
    callbacks: Sequence[Callback],
    checkpointer: Checkpointer | None,
) -> None:
    """Raise `ValueError` unless all processes call `fit` alike."""
    facts = {"callbacks": [[type(each).__name__, each.every] for each in callbacks]}
    facts |= {"saves": checkpointer is not None}
    assert_same_on_all_processes("fit", numbers | facts)


def _check_parts(loader: Any, trackers: Sequence[Any], callbacks: Sequence[Any]) -> None:
    """Refuse loaders, trackers and callbacks without the methods that `fit` calls."""
    if not isinstance(loader, Batches):
        raise TypeError(
            f"a {type(loader).__name__} is not a loader; make an eqxshard.Loader, or give "
            "an object with __iter__() and seek(step)."
        )
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise TypeError(
                f"a {type(tracker).__name__} is not a tracker; give an object with "
                "log(step, values) and close()."
            )
    check_callbacks(callbacks)
