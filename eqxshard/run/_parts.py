"""The arguments of `train` in groups: the data that a run reads, and what it trains."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from .._errors import UsageError
from ..compiled._findings import Lint
from ..data._batches import (
    Reading,
    Transform,
    check_remainder,
    make_examples,
    whole_shapes,
)
from ..data._loader import Loader, Remainder
from ..data._order import Sampler, Steps
from ..data._sources import Source, is_map_dataset
from ..data._stream import BatchStream
from ..distributed import assert_same_on_all_processes
from ..sharding._rule import Rule
from ..training._examples import Metrics
from ..training._precision import Precision
from ..training._train_step import make_train_step
from ..training._update import Nonfinite, check_options
from ._config import MakeOptim, RunConfig, make_optimizer

MakeModel = Callable[[Any], PyTree]
#: A function from the state (or states by name) and a batch to the new one and metrics.
Step = Callable[[Any, Any], tuple[Any, Metrics]]


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
        """The name of the data; empty if they have none."""
        return getattr(self.source, "name", "")

    @property
    def warning(self) -> str:
        """The warning to print before the run starts; empty if there is none."""
        return getattr(self.source, "warning", "")

    @property
    def unit(self) -> str:
        """The word for examples, such as `images`."""
        return getattr(self.source, "unit", "examples")

    def make_loader(self, config: RunConfig, mesh: Mesh) -> Loader:
        """The loader of a run, once all processes are known to have the same data.

        **Raises:**

        `ValueError` if the data of processes differ in name, a batch has more examples than
        the data, or as `make_loader` does.
        """
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
            remedy = "use a smaller one"
            if is_map_dataset(self.source):
                # Its elements may be batches already.
                remedy += ", or leave .batch(n) out, because train makes the batches"
            raise UsageError(
                f"--batch-size {config.batch_size} is more than the {steps.length} "
                f"examples; {remedy}."
            )
        return loader

    def shapes(self, config: RunConfig, size: int) -> tuple[dict[str, Any], Steps | None]:
        """The shapes of batches, known without a mesh, and the epoch of each step.

        **Arguments:**

        - `config`: the user's options.
        - `size`: the number of examples in a batch.

        **Returns:**

        A `jax.ShapeDtypeStruct` by name; and the epochs, `None` for data without.
        """
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
    """True for data that are batches already: neither arrays nor a `grain.MapDataset`."""
    return not (isinstance(source, Source | Mapping) or is_map_dataset(source))


def make_loader(
    name: str, source: Any, config: RunConfig, mesh: Mesh, **options: Any
) -> Loader:
    """Make a loader whose batches have the size that `config` gives.

    **Arguments:**

    - `name`: `"train_data"` or `"eval_data"`.
    - `source`: as for [`eqxshard.train`][].
    - `config`: the user's options.
    - `mesh`: the mesh to place batches on.
    - `options`: more options of the loader; its `seed` is used for arrays only.

    **Raises:**

    `ValueError` if a dataset makes batches of another size; and as [`eqxshard.Loader`][]
    does.
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


@dataclass(frozen=True)
class Training:
    """The model of a run, or several by name, and how they are trained."""

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

    def __post_init__(self):
        is_one = self.loss_fn is not None and not isinstance(self.make_model, Mapping)
        if self.train_step is None and not is_one:
            raise UsageError(
                "train makes the step of one model and its loss_fn; give your own as "
                "train_step= to train otherwise."
            )
        # Before a model is made, which may take a while.
        check_options(self.accumulate, self.nonfinite, self.precision)

    def for_steps(self, steps: int) -> "Training":
        """A copy that has the optimizers of a run of so many steps."""
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
        """The part that is for one of several models."""
        parts = ("make_model", "make_optim", "trainable")
        given = {part: getattr(self, part) for part in parts}
        own = {k: v[name] for k, v in given.items() if isinstance(v, Mapping)}
        return dataclasses.replace(self, **own)

    def make_step(self) -> Step:
        """The step of the run."""
        if self.train_step is not None:
            return self.train_step
        loss_fn: Any = self.loss_fn
        optim: Any = self.make_optim  # Made by `for_steps`.
        return make_train_step(
            loss_fn,
            optim,
            accumulate=self.accumulate,
            nonfinite=self.nonfinite,
            grad_norms=self.grad_norms,
            lint=self.lint,
            compiler_options=self.compiler_options,
        )


def _below(name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of the state of this name, by their paths in it."""
    found = ((path.partition("."), array) for path, array in arrays.items())
    return {rest: array for (root, _, rest), array in found if root == name}
