"""The steps: a batch goes in, a new state or a measurement comes out."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from ._update import (
    Nonfinite,
    Update,
    check_names,
    on_mesh,
    sum_over_batch,
    weights,
)
from .mesh import batch_sharding, check_batch_size, check_mesh, describe
from .metrics import Metrics
from .precision import Precision
from .rules import Rule
from .sharding import filter_shard, is_array, leaf_path, place
from .state import (
    TrainState,
    came_from_step,
    flatten_state,
    split_model,
    state_shardings,
    unflatten_state,
    with_state,
    without_state,
)
from .transforms import Skeleton, filter_jit, split

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
        self._compiled: dict[tuple[Skeleton, bool], tuple[Any, list[Any]]] = {}
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
        return self._run(state, batch, stacked=False)

    def many(self, state: TrainState, batches: PyTree) -> tuple[TrainState, Metrics]:
        """Take a step for each of several stacked batches, in one dispatch.

        **Arguments:**

        - `state`: donated.
        - `batches`: a PyTree of arrays of leading sizes steps, batch.

        **Returns:**

        The state after the last step, and the metrics, with one entry per step.

        **Raises:**

        As for a single step.
        """
        return self._run(state, batches, stacked=True)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lower a single step: for its text, its cost and its compiled memory.

        **Arguments:**

        - `state`, `batch`: as for a call; not donated.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        _check_batch(batch, self._mesh, accumulate=self.update.accumulate)
        arrays, skeleton = flatten_state(state)
        return self._prepare(state, skeleton, stacked=False)[0].lower(arrays, batch)

    def _run(
        self, state: TrainState, batch: PyTree, stacked: bool
    ) -> tuple[TrainState, Metrics]:
        _check_batch(batch, self._mesh, stacked, self.update.accumulate)
        arrays, skeleton = flatten_state(state)
        jitted, places = self._prepare(state, skeleton, stacked)
        if not came_from_step(state):
            _check_places(state, places)
            arrays = filter_shard(arrays, places)
        # JAX 0.10 crashes where this is not looked at. They are donated together.
        elif arrays[0].is_deleted():
            raise ValueError(_DONATED)
        try:
            arrays, metrics = jitted(arrays, batch)
        except ValueError:
            _check_places(state, places)
            _check_batch_places(batch, batch_sharding(self._mesh, stacked=stacked))
            raise
        state = unflatten_state(arrays, skeleton)
        if self.update.nonfinite == "raise" and np.any(metrics.nonfinite):
            steps = np.ravel(metrics.nonfinite)
            number = int(state.step) - len(steps) + 1 + int(np.argmax(steps))
            raise FloatingPointError(
                f"the loss or a gradient was not finite in step {number}; look at its "
                "batch, or use nonfinite='skip' to go on without it."
            )
        self._in_flight.add(metrics.totals["loss"])
        return state, metrics

    def _prepare(
        self, state: TrainState, skeleton: Skeleton, stacked: bool
    ) -> tuple[Any, list[Any]]:
        """The jitted step for states like this one, and where their arrays lie."""
        prepared = self._compiled.get((skeleton, stacked))
        if prepared is None:
            prepared = self._jit(state, skeleton, stacked)
            self._compiled[skeleton, stacked] = prepared
        return prepared

    def _jit(
        self, state: TrainState, skeleton: Skeleton, stacked: bool
    ) -> tuple[Any, list[Any]]:
        update = self.update
        params, _ = split_model(state.model, update.trainable)
        _check_state(state, params, update)
        places = state_shardings(state, params, update.optim, update.mesh, update.rule)
        _check_places(state, places)
        whole = NamedSharding(self._mesh, PartitionSpec())

        def train_step(arrays: list[Array], batch: PyTree) -> tuple[list[Array], Metrics]:
            state, metrics = update(skeleton.merge(arrays), batch)
            return filter_shard(split(state)[0], places), metrics

        def train_steps(
            arrays: list[Array], batches: PyTree
        ) -> tuple[list[Array], Metrics]:
            return jax.lax.scan(train_step, arrays, batches)

        jitted = jax.jit(
            train_steps if stacked else train_step,
            donate_argnums=0,
            in_shardings=(places, batch_sharding(self._mesh, stacked=stacked)),
            out_shardings=(places, whole),
        )
        return jitted, places


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

        self._mesh = mesh
        self._jitted = filter_jit(
            eval_step,
            in_shardings=(None, batch_sharding(mesh)),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
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
        _check_batch(batch, self._mesh)
        if isinstance(model, TrainState):
            raise TypeError("an eval step takes a model; give it state.model.")
        if any(x.is_deleted() for x in jax.tree.leaves(model) if isinstance(x, jax.Array)):
            raise ValueError(_DONATED)
        metrics = self._jitted(model, batch)
        self._in_flight.add(metrics.weight)
        return metrics

    def lower(self, model: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step: for its text, its cost and its compiled memory.

        **Arguments:**

        - `model`, `batch`: as for a call.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        _check_batch(batch, self._mesh)
        return self._jitted.lower(model, batch)


class _InFlight:
    """Holds one result of each call that may not be done, and bounds their number."""

    def __init__(self):
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> None:
        self._results.append(result)
        if len(self._results) > IN_FLIGHT:
            self._results.popleft().block_until_ready()


_DONATED = (
    "this state was donated to an earlier step, and its model with it; go on with the "
    "state that the step returned."
)


def _check_state(state: TrainState, params: PyTree, update: Update) -> None:
    """Refuse a state of another optimizer or filter spec, or with another loss scale."""
    fresh = eqx.filter_eval_shape(update.optim.init, params)
    if jax.tree.structure(fresh) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "the optimizer's state in this TrainState is not that of this optimizer and "
            "model; use the optimizer, and trainable=, that the state was made with."
        )
    scales = update.precision is not None and update.precision.scales_loss
    if scales != (state.loss_scale is not None):
        raise ValueError(
            "this TrainState and this step do not agree on a scale of the loss; make both "
            "with the same precision=."
        )


def _check_places(state: TrainState, places: Sequence[NamedSharding]) -> None:
    """Refuse a state of another mesh or rule; what is on no device yet may go anywhere."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(state, is_array))
    for (path, leaf), there in zip(leaves, places, strict=True):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(_DONATED)
        if _lies_elsewhere(leaf, there):
            raise ValueError(
                f"{leaf_path(path)} lies as {_in_words(leaf.sharding)}, and the step has "
                f"it as {_in_words(there)}; make the state and the step with the same mesh "
                "and rule, or move the state with filter_shard."
            )


def _check_batch_places(batch: PyTree, there: NamedSharding) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if _lies_elsewhere(leaf, there):
            raise ValueError(
                f"batch entry {leaf_path(path)} lies as {_in_words(leaf.sharding)}; place "
                "it with filter_shard(batch, batch_sharding(mesh))."
            )


def _lies_elsewhere(leaf: Any, there: NamedSharding) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(there, leaf.ndim)


def _in_words(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return str(sharding)
    return f"{sharding.spec} on {describe(sharding.mesh)}"


def _check_batch(
    batch: PyTree, mesh: Mesh, stacked: bool = False, accumulate: int = 1
) -> None:
    leading = 2 if stacked else 1
    leaves = jax.tree.leaves(batch)
    shapes: list[tuple[int, ...]] = [getattr(leaf, "shape", ()) for leaf in leaves]
    sizes = {shape[:leading] for shape in shapes}
    if len(sizes) != 1 or len(shapes[0]) < leading:
        paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
        axes = "axes of steps and examples" if stacked else "axis of examples"
        raise ValueError(
            f"the entries of a batch have the shapes {dict(zip(paths, shapes))}; give each "
            f"the same leading {axes}."
        )
    check_batch_size(shapes[0][leading - 1], mesh, accumulate=accumulate)
