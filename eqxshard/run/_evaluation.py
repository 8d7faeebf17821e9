"""The evaluation of a run, and what is wrong with it before the run starts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from ..compiled._findings import Lint
from ..data._loader import Loader
from ..data._sources import Source
from ..loop._callbacks import Callback
from ..loop._callbacks_log import EvaluateEMA, LearningRate, Throughput
from ..loop._callbacks_steps import Profile
from ..loop._callbacks_stop import EarlyStopping, TimeLimit
from ..loop._evaluate import evaluate
from ..sharding._text import comma_list, did_you_mean
from ..training._ema import ema_model
from ..training._eval_step import make_eval_step
from ..training._precision import Precision
from ..training._state import TrainState
from ..training._states import map_models
from ._config import RunConfig

#: Callbacks that report no values under names of their own choice.
_KNOWN = (EarlyStopping, EvaluateEMA, LearningRate, Profile, Throughput, TimeLimit)

#: Values that steps and these callbacks report, whatever is evaluated.
_REPORTED = ("train/", "seconds/", "goodput", "learning_rate")


class Evaluation:
    """Measures a model on the evaluation data; called with the model.

    - `measures`: whether there is something to measure, and something to measure it on.

    **Arguments:**

    - `metric_fn`, `eval_data`, `mesh`, `config`, `precision`, `lint`: those of the run.
    """

    def __init__(
        self,
        metric_fn: Callable[[Any, Any], Mapping[str, Any]] | None,
        eval_data: Source | None,
        mesh: Mesh,
        config: RunConfig,
        precision: Precision | None,
        lint: Lint,
    ):
        self.measures = metric_fn is not None and eval_data is not None
        if metric_fn is not None and eval_data is not None:
            self._step = make_eval_step(metric_fn, precision=precision, lint=lint)
            self._loader = Loader(
                eval_data, batch_size=config.batch_size, mesh=mesh, shuffle=False
            )

    def __call__(self, model: PyTree) -> dict[str, Any]:
        return evaluate(model, self._step, self._loader)

    def check(
        self, state: TrainState, best: str | None, callbacks: Sequence[Callback]
    ) -> None:
        """Trace the evaluation, and look for the metrics that others wait for.

        **Raises:**

        What `metric_fn` raises for a batch of these shapes; `ValueError` if a metric is
        waited for that no report will have.
        """
        names: list[str] = []
        if self.measures:
            lowered = self._step.lower(map_models(state), self._loader.shapes())
            metrics, _ = lowered.out_info
            names = [f"eval/{name}" for name in metrics.totals]
        if any(isinstance(each, EvaluateEMA) for each in callbacks):
            ema_model(state)  # It refuses a state that has no average.
            names += [name.replace("eval/", "ema/", 1) for name in names]
        others = any(not isinstance(each, _KNOWN) for each in callbacks)
        stops = [each.metric for each in callbacks if isinstance(each, EarlyStopping)]
        for who, name in [("best", best), *(("EarlyStopping's metric", x) for x in stops)]:
            if name is None or name in names or name.startswith(_REPORTED):
                continue
            # Callbacks of the user's own may report it.
            if others and f"eval/{name}" not in names:
                continue
            if not names:
                raise ValueError(
                    f"{who}={name!r} is no metric of this run, which evaluates nothing; "
                    "give train a metric_fn and eval_data, or leave it out."
                )
            meant = f"eval/{name}"
            hint = did_you_mean(meant if meant in names else name, names)
            raise ValueError(
                f"{who}={name!r} is no metric of this run; {hint}use one of "
                f"{comma_list(names)}."
            )
