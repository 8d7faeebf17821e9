"""The arguments of `train` in groups: what a run reads, trains and measures."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from .._errors import UsageError
from ..compiled._findings import Lint
from ..data._batches import (
    Reading,
    Transform,
    check_remainder,
    is_map_dataset,
    make_examples,
    whole_shapes,
)
from ..data._loader import Loader, Remainder
from ..data._order import Sampler, Steps
from ..data._sources import Source
from ..data._stream import BatchStream
from ..distributed import assert_same_on_all_processes
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
from ..sharding._rule import Rule
from ..sharding._text import comma_list, did_you_mean
from ..training._ema import ema_model
from ..training._eval_step import EvalStep
from ..training._examples import Metrics
from ..training._precision import Precision
from ..training._state import map_models
from ..training._train_step import make_train_step
from ..training._update import Nonfinite
from ._config import MakeOptim, RunConfig, make_optimizer

MakeModel = Callable[[Any], PyTree]
#: From the state, or states by name, and a batch, to the new ones and metrics.
Step = Callable[[Any, Any], tuple[Any, Metrics]]

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
class TrainingData:
    """The examples that a run trains on, and how it reads them."""

    source: Any
    sampler: Sampler | None
    transform: Transform | None
    remainder: Remainder
    read_options: Any
    workers: int

    @property
    def name(self) -> str:
        """What the data are called; empty if they have no name."""
        return getattr(self.source, "name", "")

    @property
    def warning(self) -> str:
        """What to know of the data before anything else."""
        return getattr(self.source, "warning", "")

    @property
    def unit(self) -> str:
        """What an example is called."""
        return getattr(self.source, "unit", "examples")

    def make_loader(self, config: RunConfig, mesh: Mesh) -> Loader:
        """The loader of a run, in the same data on all processes."""
        # Hosts may differ in what they can download.
        assert_same_on_all_processes("data", {"name": self.name})
        loader = make_loader(
            "train_data",
            self.source,
            config,
            mesh,
            seed=config.seed,
            sampler=self.sampler,
            remainder=self.remainder,
            transform=self.transform,
            read_options=self.read_options,
            workers=self.workers,
        )
        steps = loader.steps
        if loader.has_rows and steps is not None and config.batch_size > steps.length:
            remedy = "use fewer"
            if is_map_dataset(self.source):
                # It may have batches, which are no examples.
                remedy += ", or leave .batch(n) out, which train does itself"
            raise UsageError(
                f"--batch-size {config.batch_size} is more than the {steps.length} "
                f"examples; {remedy}."
            )
        return loader

    def shapes(self, config: RunConfig, size: int) -> tuple[dict[str, Any], Steps | None]:
        """The shapes of batches of a size, without a mesh, and the epoch of each step."""
        if has_batches(self.source):
            reading = Reading(0, None, 0)
            stream = BatchStream(self.source, reading, self.transform, spans=False)
            steps = None if stream.length is None else Steps(1, stream.length)
            return whole_shapes(stream.first(), size, None), steps
        batches, fingerprint = make_examples(
            self.source,
            size,
            transform=self.transform,
            remainder=self.remainder,
            seed=config.seed,
            sampler=self.sampler,
        )
        has_epochs = fingerprint["length"] is not None
        check_remainder(self.remainder, batches, not has_epochs)
        return batches.shapes(), batches.steps if has_epochs else None


def has_batches(source: Any) -> bool:
    """Whether data are batches already: no arrays, and no `grain.MapDataset`."""
    return not (isinstance(source, Source | Mapping) or is_map_dataset(source))


def make_loader(
    name: str, source: Any, config: RunConfig, mesh: Mesh, **options: Any
) -> Loader:
    """The loader of some data, which has batches of the size that `config` says.

    **Arguments:**

    - `name`: `"train_data"` or `"eval_data"`.
    - `source`: as for [`eqxshard.train`][].
    - `options`: more options of the loader; its `seed` is for arrays alone.
    """
    if not isinstance(source, Source | Mapping):
        options.pop("seed", None)
    if not has_batches(source):
        return Loader(source, batch_size=config.batch_size, mesh=mesh, **options)
    loader = Loader(source, mesh=mesh, **options)
    rows = next(iter(loader.shapes().values())).shape[0]
    if rows != config.batch_size:
        raise UsageError(
            f"--batch-size is {config.batch_size}, and the batches of {name} have {rows} "
            f"rows, over all processes; use --batch-size {rows}, or make batches of "
            "config.batch_size rows."
        )
    return loader


def make_evaluation_loader(source: Any, config: RunConfig, mesh: Mesh) -> Loader:
    """The loader of the evaluation data, which are read to their end each time."""
    loader = make_loader("eval_data", source, config, mesh, shuffle=False)
    if not loader.has_end:
        raise UsageError(
            "eval_data is an endless dataset, and each evaluation reads all of it; leave "
            ".repeat() out."
        )
    return loader


@dataclass(frozen=True)
class Training:
    """The model of a run, or several by name, and the step that trains it."""

    make_model: MakeModel | Mapping[str, MakeModel]
    make_optim: MakeOptim | Mapping[str, MakeOptim]
    loss_fn: Callable[[Any, Any, Any], Any] | None
    train_step: Step | None
    rule: Rule
    trainable: PyTree
    precision: Precision | None
    accumulate: int
    nonfinite: Nonfinite
    grad_norms: bool
    lint: Lint
    compiler_options: Mapping[str, Any] | None

    def for_steps(self, steps: int) -> "Training":
        """The same, with the optimizers of a run of some steps."""
        optims = self.make_optim
        if isinstance(optims, Mapping):
            optim = {name: make_optimizer(each, steps) for name, each in optims.items()}
        else:
            optim = make_optimizer(optims, steps)
        return dataclasses.replace(self, make_optim=optim)

    def make_states(
        self,
        make: Callable[..., Any],
        key: Key[Array, ""],
        mesh: Mesh,
        **known: Mapping[str, Array],
    ) -> Any:
        """The state of the run; or those of several models, by name.

        **Arguments:**

        - `make`: `init_state`, `abstract_state` or `complete_state`.
        - `key`, `mesh`, `known`: as for them.
        """
        if isinstance(self.make_model, Mapping):
            keys = jax.random.split(key, len(self.make_model))
            return {
                name: self._only(name).make_states(
                    make, own_key, mesh, **{k: _below(name, v) for k, v in known.items()}
                )
                for name, own_key in zip(self.make_model, keys)
            }
        return make(
            self.make_model,
            self.make_optim,
            key=key,
            mesh=mesh,
            rule=self.rule,
            trainable=self.trainable,
            precision=self.precision,
            **known,
        )

    def _only(self, name: str) -> "Training":
        """That of one of several models."""
        parts = ("make_model", "make_optim", "trainable")
        given = {part: getattr(self, part) for part in parts}
        own = {k: v[name] for k, v in given.items() if isinstance(v, Mapping)}
        return dataclasses.replace(self, **own)

    def make_step(self) -> Step:
        """The step of the run."""
        if self.train_step is not None:
            return self.train_step
        if self.loss_fn is None or isinstance(self.make_model, Mapping):
            raise UsageError(
                "train makes the step of one model and its loss_fn; give your own as "
                "train_step= to train otherwise."
            )
        optim: Any = self.make_optim  # Made by `for_steps`.
        return make_train_step(
            self.loss_fn,
            optim,
            accumulate=self.accumulate,
            nonfinite=self.nonfinite,
            grad_norms=self.grad_norms,
            lint=self.lint,
            compiler_options=self.compiler_options,
        )


def _below(name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Those of the state of a name, without it."""
    found = ((path.partition("."), array) for path, array in arrays.items())
    return {rest: array for (root, _, rest), array in found if root == name}


@dataclass(frozen=True)
class Evaluation:
    """Measures a model on the evaluation data; called with the model."""

    step: EvalStep
    loader: Loader

    def __call__(self, model: PyTree) -> dict[str, Any]:
        return evaluate(model, self.step, self.loader)

    def names(self, state: PyTree) -> list[str]:
        """The metrics, such as `eval/loss`; traces the evaluation.

        **Raises:**

        What `metric_fn` raises for a batch of these shapes.
        """
        lowered = self.step.lower(map_models(state), self.loader.shapes())
        return metric_names("eval", lowered)


def metric_names(kind: str, lowered: jax.stages.Lowered) -> list[str]:
    """The metrics of a step that is lowered, such as `train/loss`."""
    (_, metrics), _ = lowered.out_info
    return [f"{kind}/{name}" for name in metrics.totals]


def check_metrics(
    evaluation: Evaluation | None,
    state: PyTree,
    lowered: jax.stages.Lowered | None,
    best: str | None,
    callbacks: Sequence[Callback],
) -> None:
    """Look for the metrics that others wait for, before the first step.

    **Arguments:**

    - `lowered`: the train step, for the names of its metrics; `None` if they are not known.

    **Raises:**

    `ValueError` if a metric is waited for that no report will have; and as
    `Evaluation.names` does.
    """
    check_evaluated(callbacks, evaluation)
    names = [] if evaluation is None else evaluation.names(state)
    evaluated = [*names]
    # What may be reported under names that are not known here.
    others = ["train/"] if lowered is None else []
    if lowered is not None:
        names += metric_names("train", lowered)
    for each in callbacks:
        if isinstance(each, EvaluateEMA):
            ema_model(state)  # It refuses a state that has no average.
            if each.evaluate is None:
                names += [name.replace("eval/", "ema/", 1) for name in evaluated]
            else:
                others.append("ema/")
        names += ["learning_rate"] * isinstance(each, LearningRate)
        names += ["tokens_per_second", "mfu"] * isinstance(each, Throughput)
    # Callbacks of the user's own may report anything.
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
