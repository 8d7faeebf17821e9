"""What is left of a run that an error ends: its state, saved or handed back."""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..sharding._leaves import array_leaves
from ._callbacks import CallbackList
from ._report import numbers
from ._run import Run

_LOG = logging.getLogger(__name__)

Exit = Callable[
    [type[BaseException] | None, BaseException | None, TracebackType | None], bool
]


def save(run: Run, callbacks: CallbackList, checkpointer: Checkpointer) -> None:
    """Save a run's state after its last step."""
    # Those of an earlier step are not this state's.
    metrics = numbers(run.values) if run._report.step == run.step else {}
    checkpointer.save(
        run.state, loader=run.loader, metrics=metrics, callbacks=callbacks.state()
    )
    run._saved, run._wants_save = run.step, False


def rescue(run: Run, callbacks: CallbackList, checkpointer: Checkpointer | None) -> Exit:
    """An exit of a `with` block that keeps the state, whatever error ends the run.

    It is saved. If that is not possible, the error gets it as its attribute `state`.

    **Arguments:**

    - `run`: its state is the one after the last step.
    - `callbacks`: their states are saved, too.
    - `checkpointer`: where to save, if there is one.
    """
    first = run.step

    def leave(
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or run.step == first or _is_donated(run.state):
            return False
        if checkpointer is not None and _is_saved(run, callbacks, checkpointer):
            # Not a note, which would follow what the error says to do.
            _LOG.warning("the checkpoint of step %d is saved.", run.step)
        else:
            # Any exception may have attributes.
            handed: Any = error
            handed.state = run.state
            error.add_note(f"The state after step {run.step} is the error's `state`.")
        return False

    return leave


def _is_saved(run: Run, callbacks: CallbackList, checkpointer: Checkpointer) -> bool:
    """Whether a run's state is saved, or could be now."""
    try:
        # With several processes, only this one may have failed, and they save together.
        if run._saved != run.step and jax.process_count() == 1:
            save(run, callbacks, checkpointer)
            checkpointer.wait()
        return run.step in checkpointer.steps()
    # The step itself may have failed, and the first error is the one to show.
    except Exception as error:
        _LOG.error("the state of step %d could not be saved: %s", run.step, error)
        return False


def _is_donated(state: PyTree) -> bool:
    """Whether a step that failed has taken the state with it."""
    return any(
        isinstance(leaf, jax.Array) and leaf.is_deleted() for _, leaf in array_leaves(state)
    )
