"""The eval step: a model and a batch go in, metrics come out."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..compiled._findings import Finding, Lint
from ..data._weights import check_weights, fetch_weights
from ..sharding._leaves import array_leaves
from ..sharding._mesh import check_mesh
from ..sharding._placement import assign_shardings
from ..sharding._rule import Rule
from ..transforms._compiles import CompileLog, function_name
from ._compile import jit_on
from ._config import mesh_of
from ._examples import (
    check_metric_names,
    check_scalars,
    example_weights,
    sum_over_examples,
    total_weight,
)
from ._extra import DONATED, Signature, any_donated
from ._gradients import step_context
from ._in_flight import InFlight
from ._inputs import ONE_BATCH, StepInput, several_batches
from ._lint import StepLint, argument, lint_program
from ._metrics import Metrics
from ._precision import Precision
from ._state import TrainState, with_state, without_state


def make_eval_step(
    metric_fn: Callable[[Any, Any], Mapping[str, Any]],
    *,
    mesh: Mesh | None = None,
    rule: Rule | None = None,
    precision: Precision | None = None,
    max_compiles: int | None = None,
    lint: Lint = "warn",
) -> "EvalStep":
    """Make the compiled step that measures a model on a batch.

    The model is put in inference mode (`equinox.nn.inference_mode`) and is never donated.
    The step is rewritten as a train step is, unless `EQXSHARD_REWRITE=off` is in the
    environment.

    **Arguments:**

    - `metric_fn`: `metric_fn(model, batch)` returns a dict of metrics: each with one
        number or array per example, or a scalar, their mean. For a model with state,
        `model` is the pair `(model, state)`.
    - `mesh`, `rule`: by default, arrays are used as the model's are stored.
    - `precision`: the type to compute in, as for [`eqxshard.make_train_step`][]; by
        default, that of each array.
    - `max_compiles`, `lint`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    An [`eqxshard.EvalStep`][]: `metrics = eval_step(model, batch)`.

    **Raises:**

    `ValueError` if `max_compiles` is not positive, or `lint` is invalid.

    !!! Example

        ```python
        def metric_fn(model, batch):
            logits = jax.vmap(model)(batch["image"])
            return {"accuracy": jnp.argmax(logits, -1) == batch["label"]}


        eval_step = eqxshard.make_eval_step(metric_fn)
        ```
    """
    if mesh is not None:
        check_mesh(mesh)
    compile_log = CompileLog(max_compiles)
    return EvalStep(metric_fn, mesh, rule, precision, compile_log, StepLint(lint))


class EvalStep:
    """What [`eqxshard.make_eval_step`][] returns: call it with a model and a batch."""

    def __init__(
        self,
        metric_fn: Callable[[Any, Any], Mapping[str, Any]],
        mesh: Mesh | None,
        rule: Rule | None,
        precision: Precision | None,
        compile_log: CompileLog,
        lint: StepLint,
    ):
        self._metric_fn = metric_fn
        self._mesh = mesh
        self._rule = rule
        self._precision = precision
        self._compile_log = compile_log
        self._lint = lint
        self._compiled: dict[tuple[Signature, StepInput], tuple[Mesh, Any]] = {}
        #: Those of the former that lint has seen.
        self._ready: dict[tuple[Signature, StepInput], tuple[Mesh, Any]] = {}
        self._in_flight = InFlight()

    def __call__(self, model: PyTree, batch: PyTree) -> Metrics:
        """Measure a model on a batch, without waiting.

        **Arguments:**

        - `model`: not donated. If it has a state, the pair
            `(state.model, state.model_state)`.
        - `batch`: a PyTree of arrays of leading size batch, on the devices or not.

        **Returns:**

        The [`eqxshard.Metrics`][] of this batch.

        **Raises:**

        `ValueError` if the batch does not divide over the mesh, the model was donated,
        the step would compile more than `max_compiles` times, or lint finds an error.
        """
        return self._run(model, batch, ONE_BATCH)

    def many(self, model: PyTree, batches: PyTree) -> Metrics:
        """Measure a model on several batches, in one dispatch.

        **Arguments:**

        - `model`: not donated.
        - `batches`: as for [`eqxshard.TrainStep.many`][].

        **Returns:**

        The metrics, with one entry per batch.

        **Raises:**

        As for a single batch.
        """
        return self._run(model, batches, several_batches(batches))

    def lower(self, model: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step, for its text, cost and memory.

        **Arguments:**

        - `model`, `batch`: as for a call, of arrays or of `jax.ShapeDtypeStruct`s.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        arrays, signature = Signature.of(model, "model")
        mesh, jitted = self._compile(arrays, signature, ONE_BATCH)
        ONE_BATCH.check_shapes(batch, mesh, 1)
        return jitted.lower(arrays, batch)

    def _run(self, model: PyTree, batch: PyTree, kind: StepInput) -> Metrics:
        arrays, signature = take_model(model, "an eval step")
        ready = self._ready.get((signature, kind))
        mesh, jitted = ready or self._compile(arrays, signature, kind)
        kind.check_shapes(batch, mesh, 1)
        check_weights(batch)
        kind.check_ready(batch, mesh, kind.sharding(mesh))
        if ready is None:
            self._prepare(arrays, signature, kind, batch)
        self._in_flight.make_room()
        metrics = jitted(arrays, batch)
        self._in_flight.add(metrics.weight)
        return metrics

    def _prepare(
        self, arrays: list[Any], signature: Signature, kind: StepInput, batch: PyTree
    ) -> None:
        """Compile a step before its first call, and lint it."""
        check_weights(fetch_weights(batch))
        if self._lint.is_on:
            where = f"the eval step of {function_name(self._metric_fn)}"
            self._lint.report(self._lint_one(arrays, signature, kind, batch), where)
        self._ready[signature, kind] = self._compile(arrays, signature, kind)

    def _findings(self, model: PyTree, batch: PyTree) -> tuple[Finding, ...]:
        """What lint finds in a single step, whatever the level."""
        arrays, signature = Signature.of(model, "model")
        mesh, _ = self._compile(arrays, signature, ONE_BATCH)
        ONE_BATCH.check_shapes(batch, mesh, 1)
        return tuple(self._lint_one(arrays, signature, ONE_BATCH, batch))

    def _lint_one(
        self, arrays: list[Any], signature: Signature, kind: StepInput, batch: PyTree
    ) -> Iterator[Finding]:
        mesh, jitted = self._compile(arrays, signature, kind)
        program = jitted.compile(arrays, batch)
        model = signature.static.combine(arrays)
        leaves = array_leaves(without_state(model)[0], "model")
        arguments = [
            argument(path, leaf, sharding)
            for (path, leaf), sharding in zip(leaves, signature.shardings)
        ]
        yield from lint_program(
            program, mesh, model, arguments, kind, batch, precision=self._precision
        )

    def _compile(
        self, arrays: list[Any], signature: Signature, kind: StepInput
    ) -> tuple[Mesh, Any]:
        key = signature, kind
        compiled = self._compiled.get(key)
        if compiled is None:
            mesh = mesh_of(arrays, self._mesh, "model")
            signature.check_on(mesh, "model")
            compiled = self._compiled[key] = mesh, self._jit(signature, kind, mesh)
        return compiled

    def _jit(self, signature: Signature, kind: StepInput, mesh: Mesh) -> Any:
        def eval_step(arrays: list[Array], batch: PyTree) -> Metrics:
            whole = signature.static.combine(arrays)
            program = (
                f"{kind.program('eval_step', batch)} of {function_name(self._metric_fn)}"
            )
            self._compile_log.add(program, {"model": whole, "batch": batch})
            model, model_state = without_state(whole)
            if self._rule is None:
                storage, _ = without_state(signature.storage())
            else:
                storage = assign_shardings(model, mesh, self._rule)

            def measure(_: None, batch: PyTree) -> tuple[None, Metrics]:
                return None, self._measure(model, model_state, storage, batch, mesh)

            return kind.run(measure, None, batch, mesh)[1]

        # The name in profiles and compiled modules.
        eval_step.__name__ += kind.suffix

        return jit_on(
            mesh,
            eval_step,
            in_shardings=(None, kind.sharding(mesh)),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

    def _measure(
        self, model: PyTree, model_state: Any, storage: PyTree, batch: PyTree, mesh: Mesh
    ) -> Metrics:
        with step_context(model, storage, storage, batch, mesh, self._precision) as (
            model,
            batch_for_use,
        ):
            model = eqx.nn.inference_mode(model)

            def measure(batch: PyTree) -> Any:
                return self._metric_fn(with_state(model, model_state), batch)

            values = measure(batch_for_use)
            check_metric_names("the result of metric_fn", values, "nonfinite")
            check_scalars(values, measure, batch_for_use)
        sums = sum_over_examples(values, batch, mesh)
        return Metrics(sums, total_weight(example_weights(batch)), jnp.zeros((), jnp.int32))


def take_model(model: PyTree, who: str) -> tuple[list[Any], Signature]:
    """The arrays of a model, and its signature; refuse a state, and a donated model."""
    if isinstance(model, TrainState):
        raise TypeError(f"{who} takes a model; give it state.model.")
    arrays, signature = Signature.of(model, "model")
    if any_donated(arrays):
        raise ValueError(DONATED)
    return arrays, signature
