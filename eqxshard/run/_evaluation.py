"""`Evaluation`: how a run measures its model. Also the names of a run's metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._errors import UsageError
from ..compiled._findings import Lint
from ..data._loader import Loader
from ..loop._callbacks import Callback
from ..loop._clock import Part
from ..loop._evaluate import evaluate
from ..loop._ready_callbacks import (
    EarlyStopping,
    EvaluateEMA,
    LearningRate,
    Profile,
    Throughput,
    TimeLimit,
    check_evaluated,
)
from ..sharding._text import comma_list, did_you_mean
from ..training._ema import ema_model
from ..training._eval_step import EvalStep, make_eval_step
from ..training._precision import Precision
from ..training._state import map_models
from ._config import RunConfig
from ._parts import make_loader

#: Callbacks that report no values under names of their own choice.
_KNOWN = (EarlyStopping, EvaluateEMA, LearningRate, Profile, Throughput, TimeLimit)

#: Values that every run reports.
_REPORTED = (
    "train/seconds",
    "train/examples_per_second",
    "train/nonfinite",
    "goodput",
    *[f"seconds/{part}" for part in get_args(Part)],
)


@dataclass(frozen=True)
class Evaluation:
    """Measures a model on the evaluation data; called with the model."""

    step: EvalStep
    loader: Loader

    @staticmethod
    def of(
        metric_fn: Callable[..., Any] | None,
        source: Any,
        config: RunConfig,
        mesh: Mesh,
        *,
        precision: Precision | None,
        lint: Lint,
    ) -> "Evaluation | None":
        """The evaluation of a run, which reads its data to their end.

        **Arguments:** as for [`eqxshard.train`][]; `source` is its `eval_data`.

        **Returns:**

        The evaluation; `None` without `metric_fn` or without data.

        **Raises:**

        `ValueError` if the data are endless, or as `make_loader` does.
        """
        if metric_fn is None or source is None:
            return None
        step = make_eval_step(metric_fn, precision=precision, lint=lint)
        loader = make_loader("eval_data", source, config, mesh, shuffle=False)
        if not loader.has_end:
            raise UsageError(
                "eval_data is an endless dataset, and each evaluation reads all of it; "
                "leave .repeat() out."
            )
        return Evaluation(step, loader)

    def __call__(self, model: PyTree) -> dict[str, Any]:
        return evaluate(model, self.step, self.loader)

    def names(self, state: PyTree) -> list[str]:
        """The names of the metrics, such as `eval/loss`, by tracing the evaluation.

        **Raises:**

        What `metric_fn` raises for a batch of these shapes.
        """
        lowered = self.step.lower(map_models(state), self.loader.shapes())
        return metric_names("eval", lowered)


def metric_names(kind: str, lowered: jax.stages.Lowered) -> list[str]:
    """The names of the metrics of a lowered step, such as `train/loss`."""
    (_, metrics), _ = lowered.out_info
    return [f"{kind}/{name}" for name in metrics.totals]


def check_metrics(
    evaluation: Evaluation | None,
    state: PyTree,
    lowered: jax.stages.Lowered | None,
    best: str | None,
    callbacks: Sequence[Callback],
) -> None:
    """Refuse names of metrics that no report will have, before the first step.

    **Arguments:**

    - `evaluation`: the evaluation of the run, if it has one.
    - `state`: the state, or states by name.
    - `lowered`: the train step, for the names of its metrics; `None` if they are not known.
    - `best`: the metric by which the best checkpoint is kept.
    - `callbacks`: those of the run, in which each `EarlyStopping` waits for a metric.

    **Raises:**

    `ValueError` for a name that no report will have; and as `Evaluation.names` does.
    """
    check_evaluated(callbacks, evaluation)
    names = [] if evaluation is None else evaluation.names(state)
    evaluated = [*names]
    # Prefixes of reports whose names are not known here.
    others = ["train/"] if lowered is None else []
    if lowered is not None:
        names += metric_names("train", lowered)
    for each in callbacks:
        if isinstance(each, EvaluateEMA):
            ema_model(state)  # This refuses a state without an average.
            if each.evaluate is None:
                names += [name.replace("eval/", "ema/", 1) for name in evaluated]
            else:
                others.append("ema/")
        names += ["learning_rate"] * isinstance(each, LearningRate)
        names += ["tokens_per_second", "mfu"] * isinstance(each, Throughput)
    # Callbacks of the user's own may report any name, and as late as the first evaluation:
    # only its report shows that a metric is missing.
    has_others = any(not isinstance(each, _KNOWN) for each in callbacks)
    stops = [each for each in callbacks if isinstance(each, EarlyStopping)]
    wanted = [("best", best), *(("EarlyStopping's metric", x.metric) for x in stops)]
    for who, name in wanted:
        if name is None or name in names or name in _REPORTED:
            continue
        if name.startswith(tuple(others)):
            continue
        meant = f"eval/{name}"
        if has_others and meant not in names:
            continue
        remedy = "give train a metric_fn and eval_data, or leave it out"
        if name.startswith("train/") or evaluated:
            hint = did_you_mean(meant if meant in names else name, names)
            remedy = f"{hint}use one of {comma_list(names)}"
        raise UsageError(f"{who}={name!r} is no metric of this run; {remedy}.")
