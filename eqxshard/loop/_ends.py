"""How a run ends: with its state saved, or handed back, whatever ends it."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from .._errors import NonfiniteError
from ..checkpoint._checkpointer import Checkpointer
from ..data._loader import Loader
from ..distributed import is_main_process
from ..sharding._leaves import is_key
from ..sharding._rows import describe_batch
from ..sharding._text import first_few, format_bytes, say
from ..training._advice import REMEDY, is_out_of_memory, says_what_it_needs
from ..training._donation import any_donated
from ..training._state import TrainState, replace
from ..training._step import IN_FLIGHT
from ..training._train_step import TrainStep
from ._callbacks import CallbackList
from ._clock import announced
from ._loop import Loop
from ._position import Position
from ._step_metrics import shown
from ._tracker import numbers

_LOG = logging.getLogger(__name__)

#: Remedies for a host that is out of memory, by the part of the clock.
_OF_HOST = {
    "data": "use a smaller prefetch=, fewer threads in read_options=, fewer workers=, or a "
    "smaller batch.",
    "checkpoint": "a save holds a copy of this process's part of the state, {state}; save "
    "from more processes, or leave more of the host's memory free.",
    "other": "look at what this process keeps, such as datasets and lists of results.",
}


def save(loop: Loop, callbacks: CallbackList, checkpointer: Checkpointer) -> None:
    """Save the state after the last step of a run."""
    # Metrics of an earlier step are not those of this state.
    metrics = numbers(shown(loop.report.values)) if loop.report.step == loop.step else {}
    with loop.clock.phase("checkpoint", f"the checkpoint of step {loop.step}"):
        position = Position.of(loop.loader, loop.step)
        checkpointer.save(
            loop.state, loader=position, metrics=metrics, callbacks=callbacks.state()
        )
    loop.saved, loop.save_requested = loop.step, False


def announce_stop(loop: Loop) -> None:
    """Print why a run ends, and what is saved of it."""
    if loop.step == loop.first and loop.stop_reason:
        if is_main_process():
            why = f"the run has ended at step {loop.step}: {loop.stop_reason}"
            say(f"{why}; nothing is left to do.", sys.stderr)
        return
    saved = loop.checkpointer and loop.checkpointer.steps()[-1:]
    if is_main_process():
        why = f": {loop.stop_reason}" if loop.stop_reason else ""
        kept = f"the checkpoint of step {saved[0]} is saved" if saved else "not saved"
        say(f"stopped after step {loop.step}{why}; {kept}.", sys.stderr)


@contextlib.contextmanager
def rescue(loop: Loop, callbacks: CallbackList) -> Iterator[None]:
    """Keep the state of a run, whatever error ends the `with` block.

    The state is saved. If that is not possible, the error gets it as its attribute `state`.
    If a step that failed took the state's arrays, the error says so.
    """
    try:
        yield
    except BaseException as error:
        _keep_state(loop, callbacks, error)
        raise


@contextlib.contextmanager
def explain_memory(loop: Loop, train_step: Any) -> Iterator[None]:
    """Note on an out-of-memory error what the run was doing, and what to do about it."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(_describe(loop, train_step, error))
        raise


def _describe(loop: Loop, train_step: Any, error: Exception) -> str:
    phase = loop.clock.failed or loop.clock.now
    part, what = phase.part, phase.what
    where = f"in {what}"
    if part in ("device", "log") and loop.count:
        # What was dispatched may still run.
        first = max(loop.step - IN_FLIGHT * loop.count, loop.first) + 1
        where += f", or in one of the steps from {first} on"
    if isinstance(error, MemoryError):
        size = sum(
            shard.data.nbytes
            for x in jax.tree.leaves(loop.state)
            if isinstance(x, jax.Array) and not is_key(x) and not x.is_deleted()
            for shard in x.addressable_shards
            if shard.replica_id == 0
        )
        remedy = _OF_HOST.get(part, _OF_HOST["other"]).format(state=format_bytes(size))
        return f"The host was out of memory {where}; {remedy}"
    if says_what_it_needs(error):
        return f"This was {where}."
    needs = None
    if isinstance(train_step, TrainStep) and part not in ("data", "evaluation"):
        needs = train_step.machine.describe_memory()
    return f"The devices were out of memory {where}; {needs or REMEDY}"


def _keep_state(loop: Loop, callbacks: CallbackList, error: BaseException) -> None:
    if not _is_readable(loop.state):
        lost = "The state cannot be read any more: a step that failed took it; "
        error.add_note(f"{lost}{_where_to_resume(loop.checkpointer)}")
    elif loop.step == loop.first:
        pass  # No step was taken, so there is nothing to lose.
    elif loop.checkpointer and _is_saved(loop, callbacks, loop.checkpointer):
        # A signal has said so already.
        if isinstance(error, Exception):
            # Not a note, which would follow what the error says to do.
            _LOG.warning("the checkpoint of step %d is saved.", loop.step)
    else:
        # Any exception may have attributes.
        handed: Any = error
        handed.state = loop.state
        error.add_note(f"The state after step {loop.step} is the error's `state`.")


def _where_to_resume(checkpointer: Checkpointer | None) -> str:
    if checkpointer is None:
        return "give fit a checkpointer, to have one to resume from."
    saved: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        saved = checkpointer.steps()
    if not saved:
        return "nothing was saved before, so the run has to start again."
    folder = checkpointer.directory / str(saved[-1])
    return f"resume from the newest checkpoint, of step {saved[-1]}: {folder}"


def _is_readable(state: Any) -> bool:
    """True if a state can be read: no step took it, and the one that made it succeeded."""
    arrays: list[Any] = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    if any_donated(arrays):
        return False
    if jax.process_count() > 1:
        # Other processes may be gone, and an array that needs them would never be ready.
        # Arrays of keys cannot say whether they are.
        arrays = [x for x in arrays if not is_key(x) and x.is_ready()]
    try:
        jax.block_until_ready(arrays)
    except Exception:
        return False
    return True


def _is_saved(loop: Loop, callbacks: CallbackList, checkpointer: Checkpointer) -> bool:
    """Save a run's state if it is not saved yet; return whether it is saved then."""
    try:
        # With several processes, only this one may have failed, and they save together.
        if loop.saved != loop.step and jax.process_count() == 1:
            save(loop, callbacks, checkpointer)
            loop.end_save()
        return loop.step in checkpointer.steps()
    # The step itself may have failed, and the first error is the one to show.
    except Exception as error:
        _LOG.error("the state of step %d could not be saved: %s", loop.step, error)
        return False


def say_skipped(loop: Loop, train_step: Any) -> None:
    """Log how many steps a run has skipped, and the cause of the first."""
    skipped = loop.report.skipped
    if not skipped.steps or loop.step == loop.first:
        return
    try:
        skipped.found = _find_cause(loop, train_step, skipped.first)
    # The run has ended well: neither the data nor a full disk may change that.
    except Exception as error:
        skipped.found = f"Its batch cannot be looked at: {error}"
    if is_main_process():
        _LOG.warning("%s %s", skipped.describe(loop.step), skipped.found)


def _find_cause(loop: Loop, train_step: Any, step: int) -> str:
    """A sentence on a step that was skipped, and on the examples of its batch.

    The loader makes the batch again. If all of it is finite, the cause is in the model or
    the loss. The state of that step is gone by then.
    """
    loader = loop.loader
    if not isinstance(loader, Loader) or not loader.has_rows:
        return f"Look at the batch of step {step}."
    rows = loader.rows(step - 1).tolist()
    some = first_few([str(row) for row in rows])
    if jax.process_count() > 1:
        # An error that only one of them meets would keep the others waiting.
        return f"Look at examples {some} of the source, loader.rows({step - 1})."
    try:
        batch = _batch_of(loop, step)
    finally:
        loader.seek(loop.step)
    found = describe_batch(batch, rows)
    if found is not None:
        return f"Its {found}."
    said = f"Its batch is finite: examples {some} of the source, loader.rows({step - 1})."
    config = train_step.config if isinstance(train_step, TrainStep) else None
    # A loss scale is found by skipping steps.
    if config is None or (config.precision and config.precision.scales_loss):
        return said
    return (
        f"{said} Find the line with eqxshard.first_nonfinite(train_step, state, batch) of "
        "this batch and a state from before that step, such as that of a checkpoint."
    )


def _batch_of(loop: Loop, step: int) -> Any:
    """The batch of a step, which the loader makes again."""
    loop.loader.seek(step - 1)
    batches = iter(loop.loader)
    try:
        return next(batches)
    finally:
        # An iterator of the user's own need not have `close`.
        if close := getattr(batches, "close", None):
            close()


def give_up(loop: Loop, train_step: Any) -> NoReturn:
    """Raise an error that says where the first value that is not finite comes from."""
    steps = loop.report.nonfinite_steps
    message = (
        f"the loss, a gradient or an update of {len(steps)} steps in a row, from step "
        f"{steps[0]} on, was not finite"
    )
    what = "the first value that is not finite"
    try:
        with (
            # The search may compile for far longer than a step takes; the run has ended.
            loop.clock.phase("other", f"the search for {what}", is_limited=False),
            announced(f"looking for {what}", in_logs=True),
        ):
            found = _find_first(loop, train_step, steps)
    # The search may run out of memory, for example.
    except Exception as error:
        raise NonfiniteError(
            f"{message}; {what} could not be found: {type(error).__name__}: {error}"
        ) from error
    raise NonfiniteError(f"{message}; {found}")


def _find_first(loop: Loop, train_step: Any, steps: list[int]) -> str:
    """A sentence on the first value that is not finite in the first of some steps."""
    if not (isinstance(loop.state, TrainState) and isinstance(train_step, TrainStep)):
        return (
            "use a lower learning rate, or call eqxshard.first_nonfinite for one of the "
            "states, with the step from make_train_step that takes it."
        )
    from ..debug._first_nonfinite import first_nonfinite

    precision = train_step.config.following(loop.state).precision
    # A skipped step changes nothing but the number of steps and the loss scale, which is
    # now nearest to that of the last of them.
    step = steps[-1] if precision and precision.scales_loss else steps[0]
    number = jnp.full_like(loop.state.step, step - 1)
    state = replace(loop.state, step=number)
    try:
        batch = _batch_of(loop, step)
    finally:
        loop.loader.seek(loop.step)
    found = first_nonfinite(train_step, state, batch, loop.extra)
    if found is None:
        return (
            f"step {step} is finite when it is taken again, one operation at a time: "
            "the cause may be rounding, or a faulty device."
        )
    rows = getattr(loop.loader, "rows", None)
    if rows is None or not getattr(loop.loader, "has_rows", True):
        return f"in step {step}, {found.describe(None)}"
    return f"in step {step}, {found.describe(rows(step - 1))}"
