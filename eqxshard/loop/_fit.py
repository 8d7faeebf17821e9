"""`fit`: batches in order, a bounded number of steps in flight, reports in between."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from typing import Any, Literal, TypeVar

from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..distributed import assert_same_on_all_processes, is_main_process
from ..sharding._text import say
from ..training._advice import short_traceback
from ..training._examples import Metrics
from ..training._state import map_models, step_of
from ..training._step import InFlight
from ..training._train_step import TrainStep
from ._callbacks import Callback, CallbackList, check_callbacks, why_ended
from ._clock import Clock, announced, describe_time, watch
from ._due import Schedule, check_positive, evaluation_interval, last_step
from ._ends import announce_stop, explain_memory, give_up, rescue, save, say_skipped
from ._evaluate import check_evaluate
from ._loop import Loop
from ._position import Batches, Position, check_loader, dispatches_of, steps_of
from ._ready_callbacks import check_evaluated
from ._signals import stop_signals
from ._step_metrics import Report, tell
from ._tracker import Tracker, check_trackers

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
        states that have taken the same number of steps, such as a dict of the two of a
        GAN. It is donated.
    - `train_step`: from [`eqxshard.make_train_step`][]; or a function of your own from
        the state (or states) and a batch to the new state and
        [`eqxshard.training.Metrics`][], which adds 1 to each state's `step`.
    - `loader`: an [`eqxshard.Loader`][], or another object with `seek(step)` and
        `__iter__`. Without `__len__` it has no epochs.
    - `steps`, `epochs`: when to stop, counted from step 0 (not from `state.step`). Give
        one of the two.
    - `evaluate`: called with the model (with the pair `(model, state)` if the model has
        state), or, if there are several states, with a PyTree of their models; returns a
        dict of metrics.
    - `evaluate_every`: the number of steps between evaluations, or `"epoch"`. There is
        also one at the end.
    - `checkpointer`: saves the state from time to time, after an evaluation that is the
        best so far (if it has `best`), and at the end. To resume, pass the state that
        [`eqxshard.Checkpointer.restore`][] returns.
    - `trackers`: receive `train/...` metrics (means over the examples since the last
        report), `eval/...` metrics, `seconds/...` (how the time since the last report was
        spent) and `goodput` (the share of the run in which steps ran). They are closed at
        the end, whatever happens.
    - `callbacks`: [`eqxshard.callbacks.Callback`][]s, called in this order. They may stop
        the run, which then returns its state as at the end, but does not evaluate again. A
        run that [`eqxshard.callbacks.EarlyStopping`][] has stopped takes no more steps
        when it resumes.
    - `log_every`: the number of steps between reports. There is also one at the end of
        each epoch, after each evaluation and whenever a checkpoint is saved.
    - `max_nonfinite`: give up when a report finds that the last steps, at least this many
        in a row, were skipped because their loss, gradients or update were not finite. The
        error says where the first value that is not finite comes from, as
        [`eqxshard.first_nonfinite`][] does, and names the examples. If the run does not
        give up, a warning at the end gives the number of steps that were skipped, and the
        examples of the first of them.
    - `hang_seconds`: if the run waits longer than this for a batch, a step (including
        compilation), a callback, an evaluation, a tracker or a checkpoint, print the
        stacks of all threads, and end this process with exit status 1, so that a launcher
        or scheduler starts the run again from its newest checkpoint; `None` for never. It
        must be longer than the longest compilation, evaluation or save, or the run ends
        there each time. The search for the first value that is not finite has no limit.
    - `extra`: given to each step, such as a teacher; see [`eqxshard.training.TrainStep`][].
        A callback may replace it. It is not saved.

    **Returns:**

    The state at the end.

    **Raises:**

    `ValueError` unless exactly one of `steps` and `epochs` is given, if one of the
    numbers is not positive, or if the checkpointer's directory holds another run.
    `TypeError` if the loader or a tracker lacks a method, or `evaluate` is not a function
    of a model.
    `FloatingPointError` after `max_nonfinite` skipped steps. `OSError` if the last
    checkpoint could not be written. And any error of the loader, `evaluate`, a callback or
    a tracker, once the state after the last step is saved. If it cannot be saved, or there
    is no checkpointer, the error has the state as its attribute `state`. (With several
    processes, an error in one of them ends all, and they cannot save together any more.)

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
    check_loader(loader)
    check_trackers(trackers)
    check_callbacks(callbacks)
    check_evaluate(evaluate)
    check_evaluated(callbacks, evaluate)
    clock = Clock()
    report = Report(trackers if is_main_process() else (), clock, steps_of(loader))
    loop = Loop(clock, report, loader, checkpointer, state, extra, evaluate)
    # This reference would keep arrays alive, of which the first step may make copies.
    del state
    called = CallbackList(callbacks, loop)
    with ExitStack() as stack:
        stack.enter_context(short_traceback())
        # Entered first, so left last: an error from closing a tracker must not lose the
        # state either.
        stack.enter_context(rescue(loop, called))
        # Printed below what trackers print when they close.
        stack.push(lambda *failure: _say_skipped(loop, train_step, failure[0]))
        stack.callback(_print_time, loop)
        stack.push(lambda kind, error, trace: _close(clock, trackers, callbacks, error))
        check_positive(steps=steps, epochs=epochs, log_every=log_every)
        check_positive(max_nonfinite=max_nonfinite, hang_seconds=hang_seconds)
        loop.first = loop.step = report.skipped.since = step_of(loop.state)
        last = last_step(steps, epochs, report.epochs)
        between = evaluation_interval(evaluate_every, report.epochs) if evaluate else None
        stack.enter_context(watch(clock, hang_seconds))
        assert_same_on_all_processes(
            "fit",
            {
                "step": loop.first,
                "stop": last,
                "log_every": log_every,
                "evaluate_every": between,
                "max_nonfinite": max_nonfinite,
                "callbacks": [[type(each).__name__, each.every] for each in callbacks],
                "saves": checkpointer is not None,
            },
        )
        if checkpointer is not None:
            # Whatever ends the run, the save in progress is finished.
            stack.callback(loop.end_save, close=True)
            position = Position.of(loader, loop.first)
            states = checkpointer.claim_run(loop.first, position)
            called.restore(states)
            loop.stop_reason = why_ended(callbacks, states)
            # The loader's position may say that epochs began with another batch size.
            report.epochs = steps_of(loader)
            last = last_step(steps, epochs, report.epochs)
        stop = stack.enter_context(stop_signals(can_save=checkpointer is not None))
        schedule = Schedule(
            last,
            report.epochs,
            between,
            log_every,
            checkpointer,
            stop,
            called.next_step,
        )
        # If a step fails, the earlier ones are still reported.
        stack.callback(report.close)
        take_steps, batches = dispatches_of(train_step, loader, loop.first, schedule)
        stack.enter_context(closing(batches))
        # Entered last, to see the phase that failed: closing the rest begins others.
        stack.enter_context(explain_memory(loop, train_step))
        in_flight = InFlight()
        while loop.step < last and loop.stop_reason is None:
            with clock.phase("data", f"the batch of step {loop.step + 1}"):
                loop.count, batch = next(batches)
            step = loop.step + loop.count
            with clock.phase("device", f"the steps before step {step}"):
                in_flight.make_room()
            is_first = loop.step == loop.first
            saying = nullcontext()
            if is_first:
                # Compilation may take minutes.
                saying = announced("compiling the train step", in_logs=True)
            phase = "compile" if is_first else "dispatch"
            with saying, clock.phase(phase, f"step {step}"):
                extras = () if loop.extra is None else (loop.extra,)
                loop.state, loop.taken = take_steps(loop.state, batch, *extras)
                loop.step = step
            if is_first and not isinstance(train_step, TrainStep):
                loop.check_step()
            in_flight.add(loop.taken.weight)
            # Reads the metrics of earlier steps, while this one runs.
            report.flush()
            called.after_step()
            with clock.phase("device", f"step {step}"):
                due = schedule.after(step, asked=loop.asked)
            report.add(step, loop.taken, loop.count, due=due.report)
            if due.evaluate or due.save or (due.report and called.need_reports):
                report.read()
                if due.evaluate and evaluate is not None:
                    loop.evaluate(evaluate, map_models(loop.state))
                    called.after("evaluation")
                called.after("report")
                report.flush()
            # If a later step was finite, the state is no longer the one that failed.
            if len(report.nonfinite_steps) >= max_nonfinite:
                give_up(loop, train_step)
            best = due.evaluate and checkpointer and checkpointer.is_best(report.values)
            if checkpointer is not None and (due.save or loop.asked or best):
                save(loop, called, checkpointer)
                called.after("save")
                # Exclude save time from throughput.
                report.restart_speed()
            if due.leave:
                break
        loop.end_save()
        # A signal may have come after the last step.
        if stop.requested or loop.stop_reason is not None:
            announce_stop(loop)
        if stop.requested:
            stop.leave()
    return loop.state


def _print_time(loop: Loop) -> None:
    """Print where the time of a run went, if there was a report."""
    if loop.report.step is not None and is_main_process():
        # A terminal that is gone does not fail a run that is finished.
        with suppress(OSError, ValueError):
            say(describe_time(loop.clock.at_last_reading), sys.stderr)


def _say_skipped(loop: Loop, train_step: Any, kind: type[BaseException] | None) -> None:
    """Say which steps were skipped, unless an error ends the run."""
    if kind is None:
        say_skipped(loop, train_step)


def _close(
    clock: Clock,
    trackers: Sequence[Tracker],
    callbacks: Sequence[Callback],
    error: BaseException | None,
) -> None:
    """Close the callbacks, then the trackers, even if one of them fails."""
    with clock.phase("log", "the trackers and callbacks to close"), ExitStack() as stack:
        for tracker in trackers:
            stack.callback(tell, tracker.close, error)
        for callback in callbacks:
            stack.callback(callback.close)
