"""What is left of a run that an error ends: its state, saved or handed back."""

import contextlib
import logging
from types import TracebackType
from typing import Any

import jax

from ..checkpoint._checkpointer import Checkpointer
from ..sharding._leaves import is_key
from ..training._donation import any_donated
from ._callbacks import CallbackList
from ._media import numbers
from ._report import shown
from ._run import Run

_LOG = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "The devices are out of memory. Use a smaller batch, accumulate= (the same batch in "
    "parts), remat (activations computed again), bfloat16, or a rule and a mesh that split "
    "the state, such as fsdp()."
)


def save(run: Run, callbacks: CallbackList, checkpointer: Checkpointer) -> None:
    """Save the state after the last step of a run."""
    # Those of an earlier step are not this state's.
    metrics = numbers(shown(run.report.values)) if run.report.step == run.step else {}
    with run.clock.phase("checkpoint", f"the checkpoint of step {run.step}"):
        checkpointer.save(
            run.state, loader=run.loader, metrics=metrics, callbacks=callbacks.state()
        )
    run.saved, run.save_requested = run.step, False


class Rescue:
    """Keeps the state of a run, whatever error ends its `with` block.

    It is saved. If that is not possible, the error gets it as its attribute `state`. If
    the step that failed took it, the error says what was saved before.
    """

    def __init__(self):
        self._kept: tuple[Run, CallbackList] | None = None

    def watch(self, run: Run, callbacks: CallbackList) -> None:
        """Keep the state of this run, and those of its callbacks, from now on."""
        self._kept = run, callbacks

    def __enter__(self) -> "Rescue":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._kept is None:
            return
        run, callbacks = self._kept
        if _is_out_of_memory(error):
            error.add_note(_OUT_OF_MEMORY)
        if not _is_readable(run.state):
            error.add_note(_describe_lost(run.checkpointer))
        elif run.step == run.first:
            pass  # Nothing was taken yet.
        elif run.checkpointer and _is_saved(run, callbacks, run.checkpointer):
            # A signal has said so already.
            if isinstance(error, Exception):
                # Not a note, which would follow what the error says to do.
                _LOG.warning("the checkpoint of step %d is saved.", run.step)
        else:
            # Any exception may have attributes.
            handed: Any = error
            handed.state = run.state
            error.add_note(f"The state after step {run.step} is the error's `state`.")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        "RESOURCE_EXHAUSTED" in str(error)
    )


def _is_readable(state: Any) -> bool:
    """Whether a state can be read: no step took it, and the one that made it succeeded."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    if any_donated(arrays):
        return False
    if jax.process_count() > 1:
        # The others may be gone, and what waits for them would wait forever. Arrays of
        # keys cannot say whether they are ready.
        arrays = [x for x in arrays if not is_key(x) and x.is_ready()]
    try:
        jax.block_until_ready(arrays)
    except Exception:
        return False
    return True


def _describe_lost(checkpointer: Checkpointer | None) -> str:
    """What is left of a run whose last state cannot be read."""
    lost = "The state cannot be read any more: a step that failed took it;"
    if checkpointer is None:
        return f"{lost} give fit a checkpointer, to have one to resume from."
    saved: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        saved = checkpointer.steps()
    if not saved:
        return f"{lost} nothing was saved before, so the run has to start again."
    folder = checkpointer.directory / str(saved[-1])
    return f"{lost} resume from the newest checkpoint, of step {saved[-1]}: {folder}"


def _is_saved(run: Run, callbacks: CallbackList, checkpointer: Checkpointer) -> bool:
    """Whether a run's state is saved, or could be now."""
    try:
        # With several processes, only this one may have failed, and they save together.
        if run.saved != run.step and jax.process_count() == 1:
            save(run, callbacks, checkpointer)
            run.wait_for_checkpoint()
        return run.step in checkpointer.steps()
    # The step itself may have failed, and the first error is the one to show.
    except Exception as error:
        _LOG.error("the state of step %d could not be saved: %s", run.step, error)
        return False
