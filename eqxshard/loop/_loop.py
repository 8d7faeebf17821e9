"""`Loop`: what callbacks see of a run, and what they may ask of it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ..distributed import is_main_process
from ..training._metrics import Metrics
from ..training._states import step_of
from ._run import Run


class Loop:
    """The loop of [`eqxshard.fit`][], as callbacks see it.

    - `loader`: the loader, whose position is that of the next batch to be read.
    """

    def __init__(self, run: Run):
        self.loader = run.loader
        self._run = run

    @property
    def step(self) -> int:
        """The number of steps taken, counted from step 0."""
        return self._run.step

    @property
    def state(self) -> Any:
        """The state after this step; it may be replaced.

        A new one needs the structure, shapes, dtypes, shardings and step of the old one.
        It is donated to the next step, so do not keep it; copy what you need.
        """
        return self._run.state

    @state.setter
    def state(self, new: PyTree) -> None:
        if step_of(new) != self.step:
            raise ValueError(
                f"the new state is of step {step_of(new)}, and the run is at step "
                f"{self.step}; keep the step, such as with eqx.tree_at(lambda s: s.step, "
                "new, loop.state.step)."
            )
        self._run.state = new

    @property
    def extra(self) -> PyTree:
        """The `extra` of the steps, which may be replaced: by `loop.state.model`, say."""
        return next(iter(self._run.extra), None)

    @extra.setter
    def extra(self, new: PyTree) -> None:
        self._run.extra = () if new is None else (new,)

    @property
    def metrics(self) -> Metrics:
        """The [`eqxshard.Metrics`][] of the last step; nothing waits for them yet."""
        metrics = self._run.metrics
        if not metrics.weight.ndim:
            return metrics
        return jax.tree.map(lambda leaf: leaf[self._run.count - 1], metrics)

    @property
    def values(self) -> Mapping[str, Any]:
        """The values of the last report by name, and what was logged since.

        After an evaluation, this is the report that the evaluation is a part of, with the
        arrays that it returned (trackers get none).
        """
        return self._run.report.values

    @property
    def epoch(self) -> float | None:
        """The number of epochs, such as 1.5; `None` if the loader has no length."""
        return self._run.report.epoch(self.step)

    def log(self, values: Mapping[str, Any]) -> None:
        """Report more values.

        They join the report of this step, if there is one that is not sent yet. If not,
        they are sent by themselves.

        **Arguments:**

        - `values`: by name: numbers, or arrays of one, which nothing waits for here;
            [`eqxshard.trackers.Image`][]s and [`eqxshard.trackers.Histogram`][]s.
        """
        self._run.report.log(self.step, values)

    def evaluate(
        self,
        evaluate: Callable[[PyTree], Mapping[str, Any]],
        models: PyTree,
        prefix: str = "eval",
    ) -> None:
        """Evaluate, and add the results to the report, as `eval/...`.

        **Arguments:**

        - `evaluate`: as for [`eqxshard.fit`][].
        - `models`: what to call it with.
        - `prefix`: the first part of the results' names.
        """
        with self._run.clock.phase("evaluation", f"the evaluation after step {self.step}"):
            self._run.report.add_evaluation(evaluate(models), prefix)

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
        if self._run.checkpointer is None:
            raise ValueError("loop.save() needs a checkpointer; give fit checkpointer=.")
        self._run.save_requested = self.step != self._run.saved

    def stop(self, reason: str) -> None:
        """End the run after this step. The state is saved, if there is a checkpointer.

        **Arguments:**

        - `reason`: printed at the end.
        """
        self._run.stop_reason = self._run.stop_reason or reason
