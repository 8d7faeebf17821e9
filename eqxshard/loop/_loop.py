"""`Loop`: the state of one run of `fit`, which its parts share and callbacks see."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..distributed import allgather_json, is_main_process
from ..training._examples import Metrics
from ..training._state import step_of
from ._clock import Clock
from ._position import Batches
from ._step_metrics import Report


@dataclass(eq=False, repr=False)
class Loop:
    """A run of [`eqxshard.fit`][] after its latest step. Callbacks get it.

    - `loader`: the loader, whose position is that of the next batch to be read.
    - `step`: the number of steps taken, counted from step 0.
    - `state`: the state after this step; it may be replaced. A new one needs the
        structure, shapes, dtypes, shardings and step of the old one. It is donated to the
        next step, so do not keep it; copy what you need.
    - `extra`: the `extra` of the steps, which may be replaced: by `loop.state.model`, say.

    The other attributes are the loop's own.
    """

    clock: Clock
    report: Report
    loader: Batches
    checkpointer: Checkpointer | None
    state: Any
    extra: PyTree = None
    # The `evaluate` that was given to `fit`.
    evaluation: Callable[[PyTree], Mapping[str, Any]] | None = None
    # The step that the run started from.
    first: int = 0
    step: int = 0
    # The metrics of the last dispatch, and how many steps it took.
    taken: Any = None
    count: int = 0
    # The step of the last checkpoint.
    saved: int | None = None
    # What callbacks asked for.
    save_requested: bool = False
    stop_reason: str | None = None

    @property
    def metrics(self) -> Metrics:
        """The [`eqxshard.training.Metrics`][] of the last step, not waited for yet."""
        if not self.taken.weight.ndim:
            return self.taken
        return jax.tree.map(lambda leaf: leaf[self.count - 1], self.taken)

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of the last report by name, and what was logged since.

        After an evaluation, this is the report that the evaluation is a part of, with the
        arrays that it returned (trackers get none).
        """
        return self.report.values

    def log(self, values: Mapping[str, Any]) -> None:
        """Report more values.

        They join the report of this step if that is due and not sent yet; otherwise they
        are sent by themselves.

        **Arguments:**

        - `values`: by name, numbers, arrays of one number (this does not wait for them) or
            [`eqxshard.trackers.Image`][]s.
        """
        self.report.log(self.step, values)

    def evaluate(
        self,
        evaluate: Callable[[PyTree], Mapping[str, Any]],
        models: PyTree,
        prefix: str = "eval",
    ) -> None:
        """Evaluate, and add the results to the report, as `eval/...`.

        **Arguments:**

        - `evaluate`: as for [`eqxshard.fit`][].
        - `models`: the model, or models, to call it with.
        - `prefix`: the first part of the results' names.
        """
        with self.clock.phase("evaluation", f"the evaluation after step {self.step}"):
            self.report.add_evaluation(evaluate(models), prefix)

    def print(self, text: str) -> None:
        """Print text above the progress bar, in the main process alone.

        **Arguments:**

        - `text`: one line or several, such as a sample.
        """
        if is_main_process():
            # A progress bar keeps the lines that are printed above itself.
            print(text, flush=True)

    def save(self) -> None:
        """Save a checkpoint of this step.

        **Raises:**

        `ValueError` if `fit` has no checkpointer.
        """
        if self.checkpointer is None:
            raise UsageError("loop.save() needs a checkpointer; give fit checkpointer=.")
        self.save_requested = self.step != self.saved

    def stop(self, reason: str) -> None:
        """End the run after this step. The state is saved, if there is a checkpointer.

        **Arguments:**

        - `reason`: printed at the end.
        """
        self.stop_reason = self.stop_reason or reason

    @property
    def asked(self) -> bool:
        """True if a callback asked to save or to stop."""
        return self.save_requested or self.stop_reason is not None

    def agree(self) -> None:
        """Take over what callbacks asked for in any process; all processes call this."""
        if jax.process_count() == 1:
            return
        everyone = allgather_json([self.stop_reason, self.save_requested])
        reasons = [reason for reason, _ in everyone if reason is not None]
        self.stop_reason = reasons[0] if reasons else None
        self.save_requested = any(requested for _, requested in everyone)

    def check_step(self) -> None:
        """Refuse a new state that has not taken as many steps as the run."""
        if step_of(self.state) != self.step:
            raise UsageError(
                f"the state is of step {step_of(self.state)}, and the run is at step "
                f"{self.step}; let train_step add 1 to state.step for each batch, and "
                "callbacks keep it."
            )

    def end_save(self, *, close: bool = False) -> None:
        """Wait until the last checkpoint is written; raise if it cannot be.

        **Arguments:**

        - `close`: release the checkpointer, whether or not the save succeeds.
        """
        if self.checkpointer is not None:
            with self.clock.phase("checkpoint", "the last checkpoint to be written"):
                if close:
                    self.checkpointer.close()
                else:
                    self.checkpointer.wait()
