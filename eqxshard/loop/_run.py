"""One run of `fit`, which the parts of the loop share."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..distributed import allgather_json
from ..training._metrics import Metrics
from ._clock import Clock
from ._protocols import Batches
from ._report import Report


@dataclass
class Run:
    """A run after its last step.

    - `clock`, `report`, `loader`, `checkpointer`: what it uses.
    - `first`: the step that it started from.
    - `step`: the number of steps taken, counted from step 0.
    - `state`: the state, or states, after them.
    - `extra`: what else the steps are given: nothing, or one PyTree.
    - `metrics`: those of the last dispatch, which may have room for more steps than it
        took, `count`.
    - `saved`: the step of the last checkpoint.
    - `save_requested`: whether a callback asked for a checkpoint of this step.
    - `stop_reason`: why a callback asked to end the run.
    """

    clock: Clock
    report: Report
    loader: Batches
    checkpointer: Checkpointer | None
    first: int
    step: int
    state: PyTree
    extra: tuple[PyTree, ...]
    metrics: Any = None
    count: int = 0
    saved: int | None = None
    save_requested: bool = False
    stop_reason: str | None = None

    def advance(self, count: int, state: PyTree, metrics: Metrics) -> None:
        """Note that some steps were taken."""
        self.step += count
        self.count, self.state, self.metrics = count, state, metrics

    @property
    def asked(self) -> bool:
        """Whether a callback asked for something."""
        return self.save_requested or self.stop_reason is not None

    def agree(self) -> None:
        """Do what a callback of any process asked for; all processes must call this."""
        if jax.process_count() == 1:
            return
        everyone = allgather_json([self.stop_reason, self.save_requested])
        reasons = [reason for reason, _ in everyone if reason is not None]
        self.stop_reason = reasons[0] if reasons else None
        self.save_requested = any(requested for _, requested in everyone)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written, if there is a checkpointer."""
        if self.checkpointer is not None:
            with self.clock.phase("checkpoint", "the last checkpoint to be written"):
                self.checkpointer.wait()

    def close_checkpointer(self) -> None:
        """End the save in progress, whether or not it succeeds."""
        if self.checkpointer is not None:
            with self.clock.phase("checkpoint", "the last checkpoint to be written"):
                self.checkpointer.close()
