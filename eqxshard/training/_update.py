"""`train_step`: one update of a state, the pure function that a train step compiles.

Its settings are a `StepConfig`. It differentiates the mean loss over a batch, applies the
optimizer, and writes the result if it is finite (`_guard.py`, next door).
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import jaxpr_as_fun
from ..sharding._batch_weights import LOSS_WEIGHT, WEIGHT
from ..sharding._leaves import array_leaves
from ..sharding._mesh import batch_sharding, check_mesh
from ..sharding._placement import filter_shard
from ..sharding._rule import Rule
from ..sharding._spec import AnyMesh
from ..transforms._dtypes import at_least_float32
from ..transforms._partition import Static
from ._advice import check_takes
from ._examples import (
    Metrics,
    check_metric_names,
    check_scalars,
    example_loss_weights,
    example_weights,
    has_entry,
    is_step,
    is_weighted,
    mask_padding,
    own_weights,
    sum_over_examples,
    total_weight,
)
from ._guard import gradients_fit, guard_update
from ._inputs import Signature, mesh_of
from ._optimizer import apply_update
from ._precision import Precision, check_patterns
from ._state import (
    StateLayout,
    TrainState,
    constrain_state,
    fetch_offloaded,
    flatten_state,
    replace,
    split_model,
    unflatten_state,
    with_state,
)
from ._use import call_as_used

Nonfinite = Literal["skip", "raise", "ignore"]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The arguments of [`eqxshard.make_train_step`][], checked.

    `mesh`, `rule`, `trainable` and `precision` are `None` to follow the state.
    """

    loss_fn: Callable[..., Any]
    optim: optax.GradientTransformationExtraArgs
    mesh: AnyMesh | None
    rule: Rule | None
    trainable: PyTree
    accumulate: int
    precision: Precision | None
    nonfinite: Nonfinite
    grad_norms: bool

    def __post_init__(self):
        if self.mesh is not None:
            check_mesh(self.mesh)
        check_options(self.accumulate, self.nonfinite, self.precision)

    def following(self, state: TrainState) -> "StepConfig":
        """These settings, with those of the state in place of `None`."""
        made = state.made_with
        if self.rule is None and made is None:
            raise UsageError(
                "this TrainState was not made by init_state; give make_train_step rule=."
            )
        trainable = self.trainable
        if trainable is None:
            trainable = True if made is None else made.trainable(state.model)
        remedy = ", or give the step mesh= and rule="
        return dataclasses.replace(
            self,
            mesh=self.mesh or mesh_of(flatten_state(state)[0], "TrainState", remedy),
            rule=self.rule or (made and made.rule),
            trainable=trainable,
            precision=self.precision or (made and made.precision),
        )


def check_options(
    accumulate: int, nonfinite: Nonfinite, precision: Precision | None
) -> None:
    """Refuse options of a step that are out of range, or contradict one another."""
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate} must be at least 1.")
    if nonfinite not in ("skip", "raise", "ignore"):
        raise UsageError(f"nonfinite={nonfinite!r} is not 'skip', 'raise' or 'ignore'.")
    scales_loss = precision is not None and precision.scales_loss
    if scales_loss and nonfinite != "skip":
        raise UsageError(
            "float16 finds its loss scale by steps that are not finite, and "
            f"nonfinite={nonfinite!r} does not skip them; use 'skip', or bfloat16."
        )


class Gradients(NamedTuple):
    """The gradients of a batch, its loss and its metrics.

    - `grads`: the gradients of the trained arrays, each where its array is updated.
    - `loss`: the mean loss.
    - `sums`: for the loss and each metric, the weighted sum over the examples.
    - `weight`: the sum of the examples' weights.
    - `weights`: as in [`eqxshard.training.Metrics`][].
    - `model_state`: the model's own state after the batch.
    - `is_step`: as `_examples.is_step` returns it.
    """

    grads: PyTree
    loss: Float[Array, ""]
    sums: dict[str, Float[Array, " *value"]]
    weight: Float[Array, ""]
    weights: dict[str, Float[Array, ""]]
    model_state: PyTree
    is_step: Bool[Array, ""] | None


def train_step(
    config: StepConfig,
    layout: StateLayout,
    static: Static,
    signature: Signature,
    arrays: list[Array],
    kept: list[Array],
    batch: PyTree,
) -> tuple[list[Array], Metrics]:
    """Take one step.

    **Arguments:**

    - `config`: the loss function, the optimizer and the other settings.
    - `layout`: the shardings of the state.
    - `static`, `signature`: the state and the step's `extra`, without their arrays.
    - `arrays`, `kept`, `batch`: the arrays of the state and of the `extra`, and a batch.

    **Returns:**

    The arrays of the new state, and the metrics of the batch.
    """
    state = unflatten_state(arrays, static)
    extra = signature.static.combine(kept), signature.storage()
    gradients = compute_gradients(config, layout, state, batch, *extra)
    grads, loss, is_step = gradients.grads, gradients.loss, gradients.is_step
    params, frozen = split_model(state.model, config.trainable)
    before = filter_shard(params, layout.update), fetch_offloaded(state.opt_state, layout)

    def update() -> PyTree:
        new = apply_update(config.optim, grads, loss, *before, layout)
        return *new, gradients.model_state

    old, check = (*before, state.model_state), config.nonfinite != "ignore"
    new, finite = guard_update(
        update, old, grads, loss, layout, check=check, is_step=is_step
    )
    params, opt_state, model_state = new
    loss_scale = state.loss_scale
    if loss_scale is not None:
        # Another scale helps gradients that do not fit, but not other faults of an update.
        fits = gradients_fit(grads, loss, layout)
        loss_scale = _where(is_step, loss_scale.after(fits, config.precision), loss_scale)
    state = replace(
        state,
        step=state.step + 1,
        model=eqx.combine(params, frozen),
        opt_state=opt_state,
        model_state=model_state,
        loss_scale=loss_scale,
    )
    arrays, _ = flatten_state(constrain_state(state, layout))
    sums = gradients.sums
    if config.grad_norms:
        norm = optax.tree.norm(jax.tree.map(at_least_float32, grads))
        norm *= gradients.weight.astype(norm.dtype)
        norm = _where(is_step, norm, jnp.zeros_like(norm))
        sums = {**sums, "grad_norm": norm}
    nonfinite = 1 - finite.astype(jnp.int32)
    return arrays, Metrics(sums, gradients.weight, nonfinite, gradients.weights)


def _where(is_step: Bool[Array, ""] | None, new: PyTree, old: PyTree) -> PyTree:
    """The new values; the old ones if no example's loss counts."""
    if is_step is None:
        return new
    return jax.tree.map(lambda x, y: jnp.where(is_step, x, y), new, old)


def compute_gradients(
    config: StepConfig,
    layout: StateLayout,
    state: TrainState,
    batch: PyTree,
    extra: PyTree,
    extra_storage: PyTree[NamedSharding | None],
) -> Gradients:
    """Differentiate the mean loss over a batch, in `config.accumulate` microbatches.

    **Arguments:**

    - `config`, `layout`, `state`, `batch`: those of the step.
    - `extra`: the fourth argument of the loss function, if it is not `None`.
    - `extra_storage`: the shardings of its arrays.

    **Returns:**

    The gradients of the batch, its loss and its metrics.
    """
    params, frozen = split_model(state.model, config.trainable)
    weight = total_weight(example_weights(batch))
    # The losses of microbatches, divided by the weight of the batch, add up to its mean.
    loss_weight = jnp.sum(example_loss_weights(batch))
    scale = None if state.loss_scale is None else state.loss_scale.scale
    storage, update = (
        {"model": each, "extra": extra_storage} for each in (layout.model, layout.update)
    )

    def mean_loss(
        params: PyTree, frozen: PyTree, batch: PyTree, model_state: PyTree, key: Array
    ) -> tuple[Array, tuple[dict[str, Array], PyTree]]:
        """A microbatch's part of the mean loss; the sums of loss and metrics; the state."""

        def call(given: Any, batch: PyTree, model_state: PyTree, key: Array) -> Any:
            model = given["model"]
            more = () if extra is None else (given["extra"],)
            names = ("model", "batch", "key", "extra")
            check_takes(config.loss_fn, "loss_fn", *names[: 3 + len(more)])
            # Called here, and not in a function of its own: each is a frame in the
            # traceback of a mistake in the loss function.
            out = config.loss_fn(with_state(model, model_state), batch, key, *more)
            results, new_state = _split_result(out, model_state, config)
            if config.accumulate > 1 or is_weighted(batch):

                def again(batch: PyTree) -> dict[str, Any]:
                    out = config.loss_fn(with_state(model, model_state), batch, key, *more)
                    return _split_result(out, model_state, config)[0]

                check_scalars(results, again, batch, config.accumulate)
            return results, new_state

        given = {"model": eqx.combine(params, frozen), "extra": extra}
        others = model_state, key
        results, new_state = call_as_used(
            call, given, storage, update, batch, others, layout.mesh, config.precision
        )
        sums = sum_over_examples(results, batch, layout.mesh)
        loss = _mean(sums["loss"], loss_weight)
        return loss if scale is None else loss * scale, (sums, new_state)

    if config.precision is not None:
        named = {"model": state.model, "batch": batch, "extra": extra}
        paths = (path for path, _ in array_leaves(named))
        check_patterns(config.precision.compute_except, paths)
    if state.model_state is not None and has_entry(batch, WEIGHT):
        raise UsageError(
            "the model has state, such as BatchNorm's, which padded rows (the batch has "
            f"{WEIGHT!r}) would change; make the loader with remainder='drop', or call "
            f"weights of the loss {LOSS_WEIGHT!r}."
        )
    gradient = ft.partial(jax.grad(mean_loss, has_aux=True), params, frozen)
    key = jax.random.fold_in(state.key, state.step)
    batch = mask_padding(batch)
    if config.accumulate == 1:
        batch = filter_shard(batch, batch_sharding(layout.mesh))
        grads, (sums, model_state) = gradient(batch, state.model_state, key)
    else:
        grads, (sums, model_state) = accumulate_gradients(
            gradient, batch, config.accumulate, layout.mesh, state.model_state, key
        )
    # JAX's gradient of a complex number is the conjugate of the direction of ascent.
    grads = jax.tree.map(jnp.conj, grads)
    if scale is not None:
        grads = jax.tree.map(lambda grad: _unscale(grad, scale), grads)
    loss = _mean(sums["loss"], loss_weight)
    weights = own_weights(batch)
    return Gradients(grads, loss, sums, weight, weights, model_state, is_step(batch))


def _mean(total: Array, weight: Array) -> Array:
    # A negative weight would turn the loss around; the step is then not finite.
    divisor = jnp.where(weight == 0, 1, jnp.where(weight < 0, jnp.nan, weight))
    return total / divisor.astype(total.dtype)


def _split_result(
    out: Any, model_state: PyTree, config: StepConfig
) -> tuple[dict[str, Any], PyTree]:
    """The losses and metrics by name, and the model's new state, of a loss function."""
    values = [*out] if isinstance(out, tuple) else [out]
    new_state = None if model_state is None else values.pop()
    if jax.tree.structure(new_state) != jax.tree.structure(model_state):
        raise UsageTypeError(
            f"the loss function returned a {type(new_state).__name__} last, and not the "
            "state that the model returned; for a model with state, return (losses, state) "
            "or (losses, metrics, state)."
        )
    if len(values) not in (1, 2):
        raise UsageTypeError(
            f"the loss function returned {len(values)} values besides a model's state; "
            "return losses, or losses and a dict of metrics."
        )
    losses, metrics = values if len(values) == 2 else (*values, {})
    _check_losses(losses)
    reserved = ("loss", "nonfinite", *["grad_norm"] * config.grad_norms)
    check_metric_names("the loss function's metrics", metrics, *reserved)
    return {**metrics, "loss": losses}, new_state


def _check_losses(losses: Any) -> None:
    """Refuse integers and booleans, whose gradient is 0 in JAX."""
    if not eqx.is_array_like(losses):
        return
    dtype = jnp.result_type(losses)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise UsageTypeError(
            f"the loss is {dtype.name}, which has no gradient; return floating-point "
            "numbers that depend on the parameters, and counts of mistakes as a metric."
        )


def accumulate_gradients(
    gradient: Callable[..., tuple[PyTree, tuple[PyTree, PyTree]]],
    batch: PyTree,
    count: int,
    mesh: AnyMesh,
    model_state: PyTree,
    key: Array,
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    """Sum gradients and metrics over microbatches; pass the model's state along.

    `gradient(microbatch, model_state, key)` returns `(grads, (sums, model_state))`.

    Microbatch `i` is every `count`-th row from row `i`, because consecutive rows would
    all be on a few of the devices. It is taken out of the batch when its turn comes: to
    make all of them at once would need the memory of another batch.
    """
    sharding = batch_sharding(mesh)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), batch)
    rows = filter_shard(rows, sharding)

    def microbatch(index: Int[Array, ""]) -> PyTree:
        taken = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False), rows
        )
        return filter_shard(taken, sharding)

    numbers = jnp.arange(count)
    first = jax.eval_shape(microbatch, numbers[0])
    # Traced once, for the shapes of the sums and for the body of the loop.
    jaxpr, out = jax.make_jaxpr(gradient, return_shape=True)(first, model_state, key)
    structure = jax.tree.structure(out)

    def body(carry: Any, index: Int[Array, ""]) -> tuple[Any, None]:
        total, model_state = carry
        args = microbatch(index), model_state, jax.random.fold_in(key, index)
        flat = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args))
        grads, (sums, model_state) = jax.tree.unflatten(structure, flat)
        return (jax.tree.map(jnp.add, total, (grads, sums)), model_state), None

    grads, (sums, _) = out
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, sums))
    ((grads, sums), model_state), _ = jax.lax.scan(body, (zeros, model_state), numbers)
    return grads, (sums, model_state)


def _unscale(grad: Array, scale: Float[Array, ""]) -> Array:
    """Divide by the loss scale, which may be too large for the gradient's own type."""
    wide = at_least_float32(grad)
    return (wide / scale.astype(wide.dtype)).astype(grad.dtype)
