"""What is left of a run that an error ends: its state, saved or handed back."""

import logging
from types import TracebackType
from typing import Any

import jax

from ..checkpoint._checkpointer import Checkpointer
from ..training._extra import any_donated
from ._callbacks import CallbackList
from ._media import numbers
from ._report import shown
from ._run import Run

_LOG = logging.getLogger(__name__)


def save(run: Run, callbacks: CallbackList, checkpointer: Checkpointer) -> None:
    """Save a run's state after its last step."""
    clock = run._report.clock
    clock.enter("checkpoint")
    # Those of an earlier step are not this state's.
    metrics = numbers(shown(run.values)) if run._report.step == run.step else {}
    checkpointer.save(
        run.state, loader=run.loader, metrics=metrics, callbacks=callbacks.state()
    )
    run._saved, run._wants_save = run.step, False
    clock.enter("log")


class Rescue:
    """Keeps the state of a run, whatever error ends it.

    It is saved. If that is not possible, the error gets it as its attribute `state`.

    **Arguments:**

    - `checkpointer`: where to save, if there is one.
    """

    def __init__(self, checkpointer: Checkpointer | None):
        self._checkpointer = checkpointer
        self._kept: tuple[Run, CallbackList, int] | None = None

    def watch(self, run: Run, callbacks: CallbackList) -> None:
        """Keep the state of this run, and those of its callbacks, from now on."""
        self._kept = run, callbacks, run.step

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """The exit of the `with` block that the run is in."""
        if error is None or self._kept is None:
            return False
        run, callbacks, first = self._kept
        # A step that failed may have taken the state with it.
        if run.step == first or any_donated(jax.tree.leaves(run.state)):
            return False
        if self._checkpointer and _is_saved(run, callbacks, self._checkpointer):
            # A signal has said so already.
            if isinstance(error, Exception):
                # Not a note, which would follow what the error says to do.
                _LOG.warning("the checkpoint of step %d is saved.", run.step)
        else:
            # Any exception may have attributes.
            handed: Any = error
            handed.state = run.state
            error.add_note(f"The state after step {run.step} is the error's `state`.")
        return False


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
