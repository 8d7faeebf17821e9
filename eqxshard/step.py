"""The steps: a batch goes in, a new state or a measurement comes out."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ._batches import Kind, batch_place, kind_of, scan_batches
from ._check_step import (
    DONATED,
    check_batch,
    check_batch_places,
    check_places,
    check_state,
)
from ._compile import jit_on
from ._update import (
    Nonfinite,
    Update,
    check_names,
    on_mesh,
    sum_over_batch,
    weights,
)
from .mesh import check_mesh
from .metrics import Metrics
from .precision import Precision
from .rules import Rule
from .sharding import filter_shard, place
from .state import (
    TrainState,
    flat_of,
    flatten_state,
    on_device,
    on_host,
    split_model,
    state_shardings,
    unflatten_state,
    with_state,
    without_state,
)
from .transforms import Skeleton, split

#: Steps that may be dispatched and not yet done. Two keep a device busy while the host
#: prepares the next; more only hold memory, and simulated CPU devices, whose collectives
#: wait for each other in one pool of threads, deadlock after some hundreds.
IN_FLIGHT = 2


def make_train_step(
    loss_fn: Callable[[Any, Any, Any], Any],
    optim: optax.GradientTransformation,
    *,
    mesh: Mesh,
    rule: Rule,
    trainable: PyTree = True,
    accumulate: int = 1,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
) -> "TrainStep":
    """Make the compiled step: gradients, optimizer, new state, in one donated call.

    The batch is split over the `data` and `fsdp` axes of the mesh, the parameters and
    the optimizer's state as the rule says. Parameters that the rule splits over an axis
    of the batch are gathered where they are used, and their gradients are reduced back
    to where they lie.

    **Arguments:**

    - `loss_fn`: `loss_fn(model, batch, key)` returns `losses` or `(losses, metrics)`.
        `losses` has one entry per example of the batch, or is a scalar, their mean;
        `metrics` is a dict of the same, under other names than `loss` and `nonfinite`.
        The step minimises the mean over examples, weighted by `batch["weight"]` where the
        batch is a dict that has it. (What rows of weight 0 hold does not matter, as long
        as their gradients are finite.) For a model with state, `model` is the pair
        `(model, state)`, and the new state comes last in what is returned:
        `(losses, state)` or `(losses, metrics, state)`.
    - `optim`: an optax optimizer, the one the state was made with.
    - `mesh`, `rule`, `trainable`, `precision`: those the state was made with.
    - `accumulate`: take the gradient in this many parts of the batch, one after the
        other, to save memory. The result is that of the whole batch, whatever the
        weights; each part gets a key of its own, and a model's state goes from one to
        the next.
    - `nonfinite`: what to do if the loss or a gradient is not finite. `"skip"` leaves
        parameters and optimizer state exactly as they were, and counts the step in
        `Metrics.nonfinite` and in no mean; `"raise"` waits for every step, and ends the
        run there (the state was donated: go on from what was saved of it); `"ignore"`
        does not look.

    **Returns:**

    An [`eqxshard.TrainStep`][]: `state, metrics = train_step(state, batch)`.

    **Raises:**

    `ValueError` if `accumulate` or `nonfinite` is none of these, or float16 is to go on
    after what is not finite in another way than `"skip"`.

    !!! Example

        ```python
        def loss_fn(model, batch, key):
            logits = jax.vmap(model)(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


        train_step = eqxshard.make_train_step(loss_fn, optim, mesh=mesh, rule=rule)
        for batch in loader:
            state, metrics = train_step(state, batch)
        ```
    """
    check_mesh(mesh)
    if accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate} is not a number of parts; use 1 or more."
        )
    if nonfinite not in ("skip", "raise", "ignore"):
        raise ValueError(f"nonfinite={nonfinite!r} is not 'skip', 'raise' or 'ignore'.")
    if precision is not None and precision.scales_loss and nonfinite != "skip":
        raise ValueError(
            f"float16 looks for the scale of its loss by steps that are not finite, and "
            f"nonfinite={nonfinite!r} does not skip them; use 'skip', or bfloat16."
        )
    # Some optimizers want the value of the loss, too.
    extended = optax.with_extra_args_support(optim)
    return TrainStep(
        Update(loss_fn, extended, mesh, rule, trainable, accumulate, precision, nonfinite)
    )


class TrainStep:
    """What [`eqxshard.make_train_step`][] returns: call it with a state and a batch.

    At most two steps are in flight: a call waits until the last but one is done, and
    for nothing else.
    """

    def __init__(self, update: Update):
        #: What a step computes, as a pure function.
        self.update = update
        self._mesh = update.mesh
        self._compiled: dict[tuple[Skeleton, Kind], _CompiledStep] = {}
        self._in_flight = _InFlight()

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Take one step.

        **Arguments:**

        - `state`: donated: use the one that is returned.
        - `batch`: a PyTree of arrays of leading size batch, on the devices or not.

        **Returns:**

        The new state, and the [`eqxshard.Metrics`][] of this step, without waiting for
        either.

        **Raises:**

        `ValueError` if the batch does not divide over the mesh, or the state was donated
        before, or is of another mesh, rule or optimizer; `FloatingPointError` under
        `nonfinite="raise"`.
        """
        return self._run(state, batch, "one")

    def many(self, state: TrainState, batches: PyTree) -> tuple[TrainState, Metrics]:
        """Take a step for each of several batches, in one dispatch.

        **Arguments:**

        - `state`: donated.
        - `batches`: a PyTree of arrays of leading sizes steps, batch; or, for the step to
            gather them from a dataset on the devices, [`eqxshard.Loader.stacked`][]'s.

        **Returns:**

        The state after the last step, and the metrics, with one entry per step.

        **Raises:**

        As for a single step.
        """
        return self._run(state, batches, kind_of(batches))

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lower a single step: for its text, its cost and its compiled memory.

        **Arguments:**

        - `state`, `batch`: as for a call; not donated.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        arrays, skeleton = flatten_state(state)
        check_batch(batch, self._mesh, "one", self.update.accumulate)
        compiled = self._prepare(state, skeleton, "one")
        return compiled.jitted.lower(arrays, batch)

    def _run(
        self, state: TrainState, batch: PyTree, kind: Kind
    ) -> tuple[TrainState, Metrics]:
        flat = flat_of(state)
        arrays, skeleton = flatten_state(state) if flat is None else flat
        compiled = self._compiled.get((skeleton, kind))
        if compiled is None:
            compiled = self._prepare(state, skeleton, kind)
        if flat is None:
            check_places(state, compiled.places)
            arrays = filter_shard(arrays, compiled.places)
        # JAX 0.10 crashes where this is not looked at. They are donated together.
        elif arrays[0].is_deleted():
            raise ValueError(DONATED)
        try:
            arrays, metrics = compiled.jitted(arrays, batch)
        # Not those of running it, after which the state is donated.
        except (TypeError, ValueError):
            # What is wrong with what was given, in our words. Where nothing is, looking
            # would take as long as the rest of a call, so that the step itself looks when
            # it is traced.
            check_batch(batch, self._mesh, kind, self.update.accumulate)
            check_places(state, compiled.places)
            check_batch_places(batch, self._mesh, kind)
            raise
        state = unflatten_state(arrays, skeleton)
        if self.update.nonfinite == "raise" and np.any(metrics.nonfinite):
            steps = np.ravel(metrics.nonfinite)
            taken = int(batch.count) if kind == "device" else len(steps)
            number = int(state.step) - taken + 1 + int(np.argmax(steps))
            raise FloatingPointError(
                f"the loss or a gradient was not finite in step {number}; look at its "
                "batch, or use nonfinite='skip' to go on without it."
            )
        self._in_flight.add(metrics.weight)
        return state, metrics

    def _prepare(
        self, state: TrainState, skeleton: Skeleton, kind: Kind
    ) -> "_CompiledStep":
        """Compile the step for states like this one, if that was not done before."""
        compiled = self._compiled.get((skeleton, kind))
        if compiled is None:
            params, _ = split_model(state.model, self.update.trainable)
            check_state(state, params, self.update)
            compiled = _CompiledStep(self.update, state, params, skeleton, kind)
            check_places(state, compiled.places)
            self._compiled[skeleton, kind] = compiled
        return compiled


class _CompiledStep:
    """A step for states of one structure and batches of one kind, over flat arrays."""

    def __init__(
        self,
        update: Update,
        state: TrainState,
        params: PyTree,
        skeleton: Skeleton,
        kind: Kind,
    ):
        mesh = update.mesh
        #: Where each array of a state lies.
        self.places = state_shardings(state, params, update.optim, mesh, update.rule)
        whole = NamedSharding(mesh, PartitionSpec())

        def one(arrays: list[Array], batch: PyTree) -> tuple[list[Array], Metrics]:
            state, metrics = update(skeleton.merge(on_device(arrays, self.places)), batch)
            return on_host(split(state)[0], self.places), metrics

        def train_step(arrays: list[Array], batch: PyTree) -> tuple[list[Array], Metrics]:
            check_batch(batch, mesh, kind, update.accumulate)
            return one(arrays, batch)

        def train_steps(
            arrays: list[Array], batches: PyTree
        ) -> tuple[list[Array], Metrics]:
            check_batch(batches, mesh, kind, update.accumulate)
            return scan_batches(one, arrays, batches, mesh)

        #: What `jax.jit` made of it: from arrays and a batch to arrays and metrics.
        self.jitted = jit_on(
            mesh,
            train_step if kind == "one" else train_steps,
            donate_argnums=0,
            in_shardings=(self.places, batch_place(mesh, kind)),
            out_shardings=(self.places, whole),
        )


def make_eval_step(
    metric_fn: Callable[[Any, Any], Mapping[str, Any]],
    *,
    mesh: Mesh,
    rule: Rule,
    precision: Precision | None = None,
) -> "EvalStep":
    """Make the compiled step that measures a model on a batch.

    The model is put in inference mode (`equinox.nn.inference_mode`) and is never
    donated.

    **Arguments:**

    - `metric_fn`: `metric_fn(model, batch)` returns a dict of metrics: each with one
        entry per example, or a scalar, their mean. For a model with state, `model` is
        the pair `(model, state)`.
    - `mesh`, `rule`: those the model's state was made with.
    - `precision`: as for [`eqxshard.make_train_step`][].

    **Returns:**

    An [`eqxshard.EvalStep`][]: `metrics = eval_step(model, batch)`.

    !!! Example

        ```python
        def metric_fn(model, batch):
            logits = jax.vmap(model)(batch["image"])
            return {"accuracy": jnp.argmax(logits, -1) == batch["label"]}


        eval_step = eqxshard.make_eval_step(metric_fn, mesh=mesh, rule=rule)
        ```
    """
    check_mesh(mesh)
    return EvalStep(metric_fn, mesh, rule, precision)


class EvalStep:
    """What [`eqxshard.make_eval_step`][] returns: call it with a model and a batch."""

    def __init__(
        self,
        metric_fn: Callable[[Any, Any], Mapping[str, Any]],
        mesh: Mesh,
        rule: Rule,
        precision: Precision | None,
    ):
        def eval_step(model: PyTree, batch: PyTree) -> Metrics:
            model, model_state = without_state(model)
            storage = place(model, mesh, rule)
            with on_mesh(model, storage, storage, batch, mesh, precision) as (model, x):
                model = eqx.nn.inference_mode(model)
                values = metric_fn(with_state(model, model_state), x)
            check_names("what metric_fn returned", values, "nonfinite")
            sums = sum_over_batch(values, batch, mesh)
            return Metrics(sums, jnp.sum(weights(batch)), jnp.zeros((), jnp.int32))

        self._eval_step = eval_step
        self._mesh = mesh
        self._compiled: dict[tuple[Skeleton, Kind], Any] = {}
        self._in_flight = _InFlight()

    def __call__(self, model: PyTree, batch: PyTree) -> Metrics:
        """Measure a model on a batch, without waiting.

        **Arguments:**

        - `model`: not donated. With its state, if it has one: the pair
            `(state.model, state.model_state)`.
        - `batch`: a PyTree of arrays of leading size batch, on the devices or not.

        **Returns:**

        The [`eqxshard.Metrics`][] of this batch.

        **Raises:**

        `ValueError` if the batch does not divide over the mesh.
        """
        return self._run(model, batch, "one")

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
        return self._run(model, batches, kind_of(batches))

    def lower(self, model: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step: for its text, its cost and its compiled memory.

        **Arguments:**

        - `model`, `batch`: as for a call.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        check_batch(batch, self._mesh, "one")
        arrays, skeleton = split(model, "model")
        return self._prepare(skeleton, "one").lower(arrays, batch)

    def _run(self, model: PyTree, batch: PyTree, kind: Kind) -> Metrics:
        check_batch(batch, self._mesh, kind)
        if isinstance(model, TrainState):
            raise TypeError("an eval step takes a model; give it state.model.")
        arrays, skeleton = split(model, "model")
        if any(x.is_deleted() for x in arrays if isinstance(x, jax.Array)):
            raise ValueError(DONATED)
        metrics = self._prepare(skeleton, kind)(arrays, batch)
        self._in_flight.add(metrics.weight)
        return metrics

    def _prepare(self, skeleton: Skeleton, kind: Kind) -> Any:
        """The jitted step for models like this one."""
        jitted = self._compiled.get((skeleton, kind))
        if jitted is None:
            jitted = self._compiled[skeleton, kind] = self._jit(skeleton, kind)
        return jitted

    def _jit(self, skeleton: Skeleton, kind: Kind) -> Any:
        def eval_step(arrays: list[Array], batch: PyTree) -> Metrics:
            return self._eval_step(skeleton.merge(arrays), batch)

        def eval_steps(arrays: list[Array], batches: PyTree) -> Metrics:
            def step(carry: None, batch: PyTree) -> tuple[None, Metrics]:
                return None, eval_step(arrays, batch)

            return scan_batches(step, None, batches, self._mesh)[1]

        return jit_on(
            self._mesh,
            eval_step if kind == "one" else eval_steps,
            in_shardings=(None, batch_place(self._mesh, kind)),
            out_shardings=NamedSharding(self._mesh, PartitionSpec()),
        )


class _InFlight:
    """Holds one result of each call that may not be done, and bounds their number."""

    def __init__(self):
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> None:
        self._results.append(result)
        if len(self._results) > IN_FLIGHT:
            self._results.popleft().block_until_ready()
