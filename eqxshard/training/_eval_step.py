"""The eval step: a model and a batch go in, metrics come out."""

import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from ..compiled._findings import Lint
from ..sharding._mesh import check_mesh
from ..sharding._placement import assign_shardings
from ..sharding._rule import Rule
from ..sharding._spec import AnyMesh
from ._advice import check_takes
from ._examples import (
    Metrics,
    check_metric_names,
    check_scalars,
    example_weights,
    is_weighted,
    own_weights,
    sum_over_examples,
    total_weight,
)
from ._inputs import ONE_BATCH, Signature, mesh_of, several_batches
from ._precision import Precision
from ._state import refuse_state, with_state, without_state
from ._step import Key, StepMachine, Variant
from ._use import call_as_used

_MetricFn = Callable[[Any, Any], Mapping[str, Any]]


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
        number or array per example, or a scalar, their mean. The batch's
        `"__loss_weight__"` weighs the one called `loss`, as in a train step. For a model
        with state, `model` is the pair `(model, state)`.
    - `mesh`, `rule`: by default, the mesh and the shardings of the model's arrays.
    - `precision`: the type to compute in, as for [`eqxshard.make_train_step`][]; by
        default, that of each array.
    - `max_compiles`, `lint`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    An [`eqxshard.training.EvalStep`][]: `metrics = eval_step(model, batch)`.

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
    make = ft.partial(_make_pure, metric_fn, mesh, rule, precision)
    machine = StepMachine("eval_step", metric_fn, "model", make, max_compiles, lint)
    return EvalStep(machine)


class EvalStep:
    """The step of [`eqxshard.make_eval_step`][]: call it with a model and a batch."""

    def __init__(self, machine: StepMachine):
        #: The programs of the step.
        self.machine = machine

    def __call__(self, model: PyTree, batch: PyTree) -> Metrics:
        """Measure a model on a batch, without waiting.

        **Arguments:**

        - `model`: not donated. If it has a state, the pair
            `(state.model, state.model_state)`.
        - `batch`: a PyTree of arrays of leading size batch, on the devices or not.

        **Returns:**

        The [`eqxshard.training.Metrics`][] of this batch.

        **Raises:**

        `ValueError` if the batch does not divide over the mesh, the model was donated,
        the step would compile more than `max_compiles` times, or lint finds an error.
        """
        refuse_state(model, "an eval step", takes_pair=True)
        call = self.machine.look_up(None, model, ONE_BATCH)
        return self.machine.run(call, batch)[1]

    def many(self, model: PyTree, batches: PyTree) -> Metrics:
        """Measure a model on several batches, in one dispatch.

        **Arguments:**

        - `model`: not donated.
        - `batches`: as for [`eqxshard.training.TrainStep.many`][].

        **Returns:**

        The metrics, with one entry per batch.

        **Raises:**

        As for a single batch.
        """
        refuse_state(model, "an eval step", takes_pair=True)
        call = self.machine.look_up(None, model, several_batches(batches))
        return self.machine.run(call, batches)[1]

    def lower(self, model: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step, for its text, cost and memory.

        **Arguments:**

        - `model`, `batch`: as for a call, of arrays or of `jax.ShapeDtypeStruct`s.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        refuse_state(model, "an eval step", takes_pair=True)
        return self.machine.look_up(None, model, ONE_BATCH).lower(batch)


def _make_pure(
    metric_fn: _MetricFn,
    mesh: Mesh | None,
    rule: Rule | None,
    precision: Precision | None,
    state: None,
    kept: list[Any],
    key: Key,
) -> Variant:
    """The step for models of one structure."""
    on: AnyMesh = mesh or mesh_of(kept, "model", ", or give the step mesh= and rule=")
    fn = ft.partial(eval_step, metric_fn, on, rule, precision, key.kept)
    return Variant(fn, on, precision)


def eval_step(
    metric_fn: _MetricFn,
    mesh: AnyMesh,
    rule: Rule | None,
    precision: Precision | None,
    signature: Signature,
    arrays: list[Array],
    kept: list[Array],
    batch: PyTree,
) -> tuple[list[Array], Metrics]:
    """Measure a model on a batch: the pure function that an eval step compiles.

    **Arguments:**

    - `metric_fn`, `mesh`, `rule`, `precision`: as for [`eqxshard.make_eval_step`][].
    - `signature`: the model without its arrays.
    - `arrays`: the arrays of a state: none, as an eval step has no state.
    - `kept`, `batch`: the arrays of the model, and a batch.

    **Returns:**

    `arrays`, and the metrics of the batch.
    """
    model, model_state = without_state(signature.static.combine(kept))
    stored, _ = without_state(signature.storage())
    if rule is not None:
        stored = assign_shardings(model, mesh, rule)
    storage = {"model": stored}

    def measure(given: Any, batch: PyTree, model_state: PyTree) -> Mapping[str, Any]:
        check_takes(metric_fn, "metric_fn", "model", "batch")
        model = eqx.nn.inference_mode(given["model"])

        def apply(batch: PyTree) -> Mapping[str, Any]:
            return metric_fn(with_state(model, model_state), batch)

        values = apply(batch)
        check_metric_names("the result of metric_fn", values, "nonfinite")
        if is_weighted(batch):
            check_scalars(values, apply, batch)
        return values

    given, others = {"model": model}, (model_state,)
    values = call_as_used(measure, given, storage, storage, batch, others, mesh, precision)
    sums = sum_over_examples(values, batch, mesh)
    weight, nonfinite = total_weight(example_weights(batch)), jnp.zeros((), jnp.int32)
    return arrays, Metrics(sums, weight, nonfinite, own_weights(batch))
