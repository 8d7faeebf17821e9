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
from ._run import Run
from ._signals import announce_stop

_LOG = logging.getLogger(__name__)

Exit = Callable[
    [type[BaseException] | None, BaseException | None, TracebackType | None], bool
]


def save(run: Run, callbacks: CallbackList, checkpointer: Checkpointer) -> None:
    """Save a run's state after its last step."""
    # Those of an earlier step are not this state's.
    metrics = run.values if run._report.step == run.step else {}
    checkpointer.save(
        run.state, loader=run.loader, metrics=metrics, callbacks=callbacks.state()
    )
    run._saved, run._wants_save = run.step, False


def rescue(run: Run, callbacks: CallbackList, checkpointer: Checkpointer | None) -> Exit:
    """An exit of a `with` block that keeps the state, whatever error ends the run.

    With several processes nothing is saved: an error in one of them ends all, and they
    cannot save together any more.

    **Arguments:**

    - `run`: its state is the one after the last step.
    - `callbacks`: their states are saved, too.
    - `checkpointer`: where it is saved; without one, the error gets it as `error.state`.
    """
    first = run.step

    def leave(
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None or run.step in (first, run._saved) or _is_donated(run.state):
            return False
        if checkpointer is None:
            # Any exception may have attributes.
            handed: Any = error
            handed.state = run.state
            error.add_note(f"The state after step {run.step} is the error's `state`.")
        elif jax.process_count() == 1:
            try:
                save(run, callbacks, checkpointer)
                announce_stop(f"failed after step {run.step}", checkpointer)
            # The step itself may have failed, and the first error is the one to show.
            except Exception as another:
                _LOG.error("the state of step %d is not saved: %s", run.step, another)
        return False

    return leave


def _is_donated(state: PyTree) -> bool:
    """Whether a step that failed has taken the state with it."""
    return any(
        isinstance(leaf, jax.Array) and leaf.is_deleted() for _, leaf in array_leaves(state)
    )
