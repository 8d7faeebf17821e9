"""`Run`: what callbacks see of a run, and what they may ask of it."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ..distributed import is_main_process
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import format_sharding
from ..training._inputs import is_elsewhere
from ..training._metrics import Metrics
from ..training._states import step_of
from ._protocols import Batches
from ._report import Report


class Run:
    """A run of [`eqxshard.fit`][], as callbacks see it.

    - `step`: the number of steps taken.
    - `loader`: the loader, whose position is that of the next batch to be read.
    """

    def __init__(
        self,
        state: PyTree,
        step: int,
        loader: Batches,
        report: Report,
        saves: bool,
        extra: PyTree,
    ):
        self.step = step
        self.loader = loader
        self._state = state
        self._report = report
        self.extra = extra
        # The step of the last checkpoint that this run saved.
        self._saved: int | None = None
        # What callbacks ask for: to save, or to stop, and why.
        self._can_save = saves
        self._wants_save = False
        self._why_stop: str | None = None

    def _advance(self, step: int, count: int, state: PyTree, metrics: Metrics) -> None:
        """Note that some steps were taken (there may be room for more in the metrics)."""
        self.step, self._count, self._state, self._metrics = step, count, state, metrics

    @property
    def state(self) -> Any:
        """The state after this step; it may be replaced.

        A new one needs the structure, shapes, dtypes, shardings and step of the old one.
        It is donated to the next step, so do not keep it; copy what you need.
        """
        return self._state

    @state.setter
    def state(self, new: PyTree) -> None:
        _check_replacement(self._state, new)
        if step_of(new) != self.step:
            raise ValueError(
                f"the new state is of step {step_of(new)}, and the run is at step "
                f"{self.step}; keep the step, such as with eqx.tree_at(lambda s: s.step, "
                "new, run.state.step)."
            )
        self._state = new

    @property
    def extra(self) -> PyTree:
        """The `extra` of the steps, which may be replaced: by `run.state.model`, say."""
        return self._extra[0] if self._extra else None

    @extra.setter
    def extra(self, new: PyTree) -> None:
        self._extra = () if new is None else (new,)

    @property
    def metrics(self) -> Metrics:
        """The [`eqxshard.Metrics`][] of the last step; nothing waits for them yet."""
        if not self._metrics.weight.ndim:
            return self._metrics
        return jax.tree.map(lambda leaf: leaf[self._count - 1], self._metrics)

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of the last report by name, and what was logged since.

        After an evaluation, this is the report that the evaluation is a part of, with the
        arrays that it returned (trackers get none).
        """
        return self._report.values

    @property
    def epoch(self) -> float | None:
        """The number of epochs, such as 1.5; `None` if the loader has no length."""
        return self._report.epoch(self.step)

    def log(self, values: Mapping[str, Any]) -> None:
        """Report more values.

        They join the report of this step, if there is one that is not sent yet. If not,
        they are sent by themselves.

        **Arguments:**

        - `values`: by name: numbers, or arrays of one, which nothing waits for here;
            [`eqxshard.trackers.Image`][]s and [`eqxshard.trackers.Histogram`][]s.
        """
        self._report.log(self.step, values)

    def print(self, text: str) -> None:
        """Print text above the progress bar; of several processes, only the main one does.

        **Arguments:**

        - `text`: of one line or several, such as a sample.
        """
        if is_main_process():
            # While there is a bar, it keeps such lines above itself.
            print(text, flush=True)

    def save(self) -> None:
        """Save a checkpoint of this step.

        **Raises:**

        `ValueError` if `fit` has no checkpointer.
        """
        if not self._can_save:
            raise ValueError("run.save() needs a checkpointer; give fit checkpointer=.")
        self._wants_save = self.step != self._saved

    def stop(self, reason: str) -> None:
        """End the run after this step. The state is saved, if there is a checkpointer.

        **Arguments:**

        - `reason`: printed at the end.
        """
        self._why_stop = self._why_stop or reason


def _check_replacement(old: PyTree, new: PyTree) -> None:
    """Raise `ValueError` unless a state can take the place of another."""
    ours, theirs = array_leaves(old), array_leaves(new)
    if jax.tree.structure(old) != jax.tree.structure(new) or len(ours) != len(theirs):
        raise ValueError(
            "the new state has another structure than the run's; change arrays of "
            "run.state only, such as with eqx.tree_at."
        )
    for (path, was), (_, leaf) in zip(ours, theirs):
        if (leaf.shape, leaf.dtype) != (was.shape, was.dtype):
            raise ValueError(
                f"{path} of the new state is {format_array(leaf)}, and the run's is "
                f"{format_array(was)}; keep shapes and dtypes."
            )
        if leaf.is_deleted():
            raise ValueError(f"{path} of the new state was donated; give one that is not.")
        if is_elsewhere(leaf, was.sharding):
            raise ValueError(
                f"{path} of the new state is sharded as {format_sharding(leaf.sharding)}, "
                f"and the run's as {format_sharding(was.sharding)}; move it with "
                "filter_shard."
            )
