"""The steps: a batch goes in, a new state or a measurement comes out."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float, Int, PyTree

from .mesh import batch_sharding, check_batch_size, describe
from .metrics import Metrics, weighted_sums
from .sharding import (
    Rule,
    compute_sharding,
    filter_shard,
    is_array,
    leaf_path,
    shardings,
)
from .state import TrainState, flatten_state, is_param, state_shardings, unflatten_state
from .transforms import Skeleton, filter_jit, split

#: Steps that may be dispatched and not yet done. Two keep a device busy while the host
#: prepares the next; more only hold memory, and simulated CPU devices, whose collectives
#: wait for each other in one pool of threads, deadlock after some hundreds.
IN_FLIGHT = 2

Nonfinite = Literal["skip", "raise", "ignore"]


def make_train_step(
    loss_fn: Callable[[Any, Any, Any], Any],
    optim: optax.GradientTransformation,
    *,
    mesh: Mesh,
    rule: Rule,
    accumulate: int = 1,
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
        `metrics` is a dict of the same. The step minimises the mean over examples,
        weighted by `batch["weight"]` where the batch is a dict that has it.
    - `optim`: an optax optimizer, the one the state was made with.
    - `mesh`, `rule`: those the state was made with.
    - `accumulate`: take the gradient in this many parts of the batch, one after the
        other, to save memory. The result is that of the whole batch, whatever the
        weights; each part gets a key of its own.
    - `nonfinite`: what to do if the loss or a gradient is not finite. `"skip"` leaves
        parameters and optimizer state exactly as they were, and counts the step in
        `Metrics.nonfinite` and in no mean; `"raise"` waits for every step, and ends the
        run there (the state was donated: go on from what was saved of it); `"ignore"`
        does not look.

    **Returns:**

    An [`eqxshard.TrainStep`][]: `state, metrics = train_step(state, batch)`.

    **Raises:**

    `ValueError` if `accumulate` or `nonfinite` is none of these.

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
    if accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate} is not a number of parts; use 1 or more."
        )
    if nonfinite not in ("skip", "raise", "ignore"):
        raise ValueError(f"nonfinite={nonfinite!r} is not 'skip', 'raise' or 'ignore'.")
    return TrainStep(loss_fn, optim, mesh, rule, accumulate, nonfinite)


class TrainStep:
    """What [`eqxshard.make_train_step`][] returns: call it with a state and a batch.

    At most two steps are in flight: a call waits until the last but one is done, and
    for nothing else.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any, Any], Any],
        optim: optax.GradientTransformation,
        mesh: Mesh,
        rule: Rule,
        accumulate: int,
        nonfinite: Nonfinite,
    ):
        self._loss_fn = loss_fn
        self._optim = optim
        self._mesh = mesh
        self._rule = rule
        self._accumulate = accumulate
        self._nonfinite = nonfinite
        self._jitted: dict[tuple[Skeleton, bool], Any] = {}
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
        """Lower a single step: for its text, its cost and its compiled memory."""
        arrays, skeleton = flatten_state(state)
        return self._jit(state, skeleton, stacked=False).lower(arrays, batch)

    def _run(
        self, state: TrainState, batch: PyTree, stacked: bool
    ) -> tuple[TrainState, Metrics]:
        _check_batch(batch, self._mesh, stacked)
        arrays, skeleton = flatten_state(state)
        # JAX 0.10 crashes where this is not looked at. They are donated together.
        if arrays[0].is_deleted():
            raise ValueError(
                "this state was donated to an earlier step; go on with the one that the "
                "step returned."
            )
        jitted = self._jitted.get((skeleton, stacked))
        if jitted is None:
            jitted = self._jitted[skeleton, stacked] = self._jit(state, skeleton, stacked)
        arrays, metrics = jitted(arrays, batch)
        state = unflatten_state(arrays, skeleton)
        if self._nonfinite == "raise" and np.asarray(metrics.nonfinite).any():
            raise FloatingPointError(
                f"the loss or a gradient was not finite in step {int(state.step)}; look "
                "at its batch, or use nonfinite='skip' to go on without it."
            )
        self._in_flight.add(metrics.totals["loss"])
        return state, metrics

    def _jit(self, state: TrainState, skeleton: Skeleton, stacked: bool) -> Any:
        places = state_shardings(state, self._optim, self._mesh, self._rule)
        _check_places(state, places)
        whole = NamedSharding(self._mesh, PartitionSpec())

        def train_step(arrays: list[Array], batch: PyTree) -> tuple[list[Array], Metrics]:
            state, metrics = self._update(skeleton.merge(arrays), batch)
            return filter_shard(split(state)[0], places), metrics

        def train_steps(
            arrays: list[Array], batches: PyTree
        ) -> tuple[list[Array], Metrics]:
            return jax.lax.scan(train_step, arrays, batches)

        return jax.jit(
            train_steps if stacked else train_step,
            donate_argnums=0,
            in_shardings=(places, batch_sharding(self._mesh, stacked=stacked)),
            out_shardings=(places, whole),
        )

    def _update(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step as a pure function: what the compiled call computes."""
        params, rest = eqx.partition(state.model, is_param)
        storage = shardings(params, self._mesh, self._rule)
        total = jnp.sum(_weight(batch))

        def objective(params: PyTree, part: PyTree, key: Array) -> tuple[Array, Any]:
            model = eqx.combine(_gather(params, storage), rest)
            sums = self._measure(model, part, key)
            # By the weight of the whole batch, so that its parts add up to its mean.
            return sums["loss"] / _nonzero(total), sums

        gradient = jax.grad(objective, has_aux=True)
        key = jax.random.fold_in(state.key, state.step)
        if self._accumulate == 1:
            grads, sums = gradient(
                params, filter_shard(batch, batch_sharding(self._mesh)), key
            )
        else:
            parts = _split_rows(batch, self._accumulate, self._mesh)
            grads, sums = _accumulate(gradient, params, parts, key)

        def update() -> tuple[PyTree, PyTree]:
            updates, opt_state = self._optim.update(grads, state.opt_state, params)
            return eqx.apply_updates(params, updates), opt_state

        nonfinite = jnp.zeros((), jnp.int32)
        if self._nonfinite == "ignore":
            params, opt_state = update()
        else:
            finite = _all_finite(grads, storage, self._mesh) & jnp.isfinite(sums["loss"])
            params, opt_state = _update_if(
                finite, update, (params, state.opt_state), self._mesh
            )
            nonfinite = 1 - finite.astype(jnp.int32)
        model = eqx.combine(params, rest)
        state = TrainState(state.step + 1, model, opt_state, state.key)
        return state, Metrics(sums, total, nonfinite)

    def _measure(self, model: PyTree, batch: PyTree, key: Array) -> dict[str, Array]:
        """Call the user's loss, on the mesh, and sum what it returns over the batch."""
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            out = self._loss_fn(model, batch, key)
        losses, metrics = out if isinstance(out, tuple) else (out, {})
        _check_dict("the loss function's metrics are", metrics)
        if "loss" in metrics:
            raise ValueError(
                "a metric is named 'loss', which is the name of the loss itself; leave it "
                "out, or give it another name."
            )
        return _sums({**metrics, "loss": losses}, batch, self._mesh)


def make_eval_step(
    metric_fn: Callable[[Any, Any], Mapping[str, Any]], *, mesh: Mesh, rule: Rule
) -> "EvalStep":
    """Make the compiled step that measures a model on a batch.

    The model is put in inference mode (`equinox.nn.inference_mode`) and is never
    donated.

    **Arguments:**

    - `metric_fn`: `metric_fn(model, batch)` returns a dict of metrics: each with one
        entry per example, or a scalar, their mean.
    - `mesh`, `rule`: those the model's state was made with.

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
    return EvalStep(metric_fn, mesh, rule)


class EvalStep:
    """What [`eqxshard.make_eval_step`][] returns: call it with a model and a batch."""

    def __init__(
        self, metric_fn: Callable[[Any, Any], Mapping[str, Any]], mesh: Mesh, rule: Rule
    ):
        def eval_step(model: PyTree, batch: PyTree) -> Metrics:
            params, rest = eqx.partition(model, is_param)
            params = _gather(params, shardings(params, mesh, rule))
            model = eqx.nn.inference_mode(eqx.combine(params, rest))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                values = metric_fn(model, batch)
            _check_dict("metric_fn returned", values)
            sums = _sums(values, batch, mesh)
            return Metrics(sums, jnp.sum(_weight(batch)), jnp.zeros((), jnp.int32))

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

        - `model`: not donated.
        - `batch`: a PyTree of arrays of leading size batch, on the devices or not.

        **Returns:**

        The [`eqxshard.Metrics`][] of this batch.

        **Raises:**

        `ValueError` if the batch does not divide over the mesh.
        """
        _check_batch(batch, self._mesh)
        if any(x.is_deleted() for x in jax.tree.leaves(model) if isinstance(x, jax.Array)):
            raise ValueError(
                "this model was donated to a step, as part of its state; evaluate the one "
                "in the state that the step returned."
            )
        metrics = self._jitted(model, batch)
        self._in_flight.add(metrics.weight)
        return metrics


class _InFlight:
    """Holds one result of each call that may not be done, and bounds their number."""

    def __init__(self):
        self._results: collections.deque[Any] = collections.deque()

    def add(self, result: Any) -> None:
        self._results.append(result)
        if len(self._results) > IN_FLIGHT:
            self._results.popleft().block_until_ready()


def _check_places(state: TrainState, places: Sequence[NamedSharding]) -> None:
    """Refuse a state of another mesh or rule, which JAX would in words of its own."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(state, is_array))
    for (path, leaf), place in zip(leaves, places, strict=True):
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            continue
        if not leaf.sharding.is_equivalent_to(place, leaf.ndim):
            raise ValueError(
                f"{leaf_path(path)} lies as {_in_words(leaf.sharding)}, and the step has "
                f"it as {_in_words(place)}; make the state and the step with the same mesh "
                "and rule, or move the state with filter_shard."
            )


def _in_words(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return str(sharding)
    return f"{sharding.spec} on {describe(sharding.mesh)}"


def _check_dict(what: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{what} a {type(values).__name__}; return a dict of metrics by name."
        )


def _check_batch(batch: PyTree, mesh: Mesh, stacked: bool = False) -> None:
    axis = 1 if stacked else 0
    shapes: list[tuple[int, ...]] = [
        getattr(x, "shape", ()) for x in jax.tree.leaves(batch)
    ]
    rows = {shape[axis : axis + 1] for shape in shapes}
    if len(rows) != 1 or () in rows:
        paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
        raise ValueError(
            f"the entries of a batch have the shapes {dict(zip(paths, shapes))}; give each "
            f"the same number of examples along axis {axis}."
        )
    check_batch_size(rows.pop()[0], mesh)


def _weight(batch: PyTree) -> Float[Array, " batch"]:
    if isinstance(batch, Mapping) and "weight" in batch:
        return batch["weight"].astype(jnp.float32)
    return jnp.ones(jax.tree.leaves(batch)[0].shape[0], jnp.float32)


def _nonzero(total: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(total == 0, 1.0, total)


def _sums(values: Mapping[str, Any], batch: PyTree, mesh: Mesh) -> dict[str, Array]:
    weight = _weight(batch)

    def split_like_rows(value: Any) -> Any:
        rows = batch_sharding(mesh)
        return filter_shard(value, rows) if jnp.shape(value) == weight.shape else value

    return weighted_sums(jax.tree.map(split_like_rows, dict(values)), weight)


def _gather(params: PyTree, storage: PyTree[NamedSharding]) -> PyTree:
    """Bring each parameter from where it is stored to where it is used.

    Its gradient takes the same way back in one go: summed over the batch's axes and
    left where the parameter is stored, which is a reduce-scatter.
    """

    def one(param: Array, place: NamedSharding) -> Array:
        @jax.custom_vjp
        def gather(param: Array) -> Array:
            return jax.lax.with_sharding_constraint(param, compute_sharding(place))

        def back(_: None, grad: Array) -> tuple[Array]:
            return (jax.lax.with_sharding_constraint(grad, place),)

        gather.defvjp(lambda param: (gather(param), None), back)
        return gather(param)

    return jax.tree.map(one, params, storage)


def _split_rows(batch: PyTree, parts: int, mesh: Mesh) -> PyTree:
    """Give a batch a leading axis of parts, each device keeping the rows that it has.

    Part `i` is every `parts`-th row from row `i`: consecutive rows would all be on a few
    of the devices.
    """

    def one(leaf: Array) -> Array:
        rows = leaf.shape[0]
        if rows % parts:
            raise ValueError(
                f"batch size {rows} does not divide in accumulate={parts} parts; choose a "
                f"multiple of {parts}."
            )
        try:
            check_batch_size(rows // parts, mesh)
        except ValueError as error:
            raise ValueError(
                f"in accumulate={parts} parts of {rows} rows, {error}"
            ) from None
        return jnp.swapaxes(leaf.reshape(rows // parts, parts, *leaf.shape[1:]), 0, 1)

    return filter_shard(jax.tree.map(one, batch), batch_sharding(mesh, stacked=True))


def _accumulate(
    gradient: Callable[..., tuple[PyTree, PyTree]],
    params: PyTree,
    parts: PyTree,
    key: Array,
) -> tuple[PyTree, PyTree]:
    """Add up gradients and sums over the parts of a batch."""

    def body(total: PyTree, numbered: tuple[Array, PyTree]) -> tuple[PyTree, None]:
        index, part = numbered
        new = gradient(params, part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, new), None

    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes = jax.eval_shape(gradient, params, first, key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    count = jax.tree.leaves(parts)[0].shape[0]
    return jax.lax.scan(body, zeros, (jnp.arange(count), parts))[0]


def _all_finite(
    tree: PyTree, storage: PyTree[NamedSharding], mesh: Mesh
) -> Bool[Array, ""]:
    """Whether no element is infinite or nan: each device looks at what it stores."""
    leaves = jax.tree.leaves(tree)
    specs = [place.spec for place in jax.tree.leaves(storage)]
    axes = tuple({axis for spec in specs for axis in jax.tree.leaves(tuple(spec))})

    def local(leaves: list[Array]) -> Int[Array, ""]:
        # Small leaves all at once: with a reduction for each, a small model would wait
        # longer than for its optimizer.
        small: dict[Any, list[Array]] = {}
        for leaf in leaves:
            if leaf.size < 2**16:
                small.setdefault(leaf.dtype, []).append(leaf.ravel())
        parts = [leaf for leaf in leaves if leaf.size >= 2**16]
        parts += [jnp.concatenate(group) for group in small.values()]
        finite = jnp.stack([jnp.all(jnp.isfinite(part)) for part in parts])
        bad = jnp.sum(~finite, dtype=jnp.int32)
        return jax.lax.psum(bad, axes) if axes else bad

    count = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec())
    return count(leaves) == 0


def _update_if(
    condition: Bool[Array, ""], update: Callable[[], PyTree], old: PyTree, mesh: Mesh
) -> PyTree:
    """Update, or keep what is old exactly as it is."""
    if mesh.devices.flat[0].platform == "cpu":
        # A select would have XLA:CPU copy the optimizer's state, for lack of a kernel
        # that writes several results at once.
        arrays, static = eqx.partition(old, eqx.is_array)
        new = jax.lax.cond(
            condition, lambda: eqx.filter(update(), eqx.is_array), lambda: arrays
        )
        return eqx.combine(new, static)
    # A branch would have a GPU wait for the host to decide.
    return jax.tree.map(
        lambda new, old: jnp.where(condition, new, old) if eqx.is_array(new) else old,
        update(),
        old,
    )
