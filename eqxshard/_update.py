"""What a step computes: pure functions, on PyTrees that lie on a mesh."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ._gather import gathered
from .mesh import batch_sharding
from .metrics import Metrics
from .precision import Precision, cast, widen
from .rules import Rule, optimizer_rule
from .sharding import filter_shard, place
from .state import TrainState, split_model, with_state

Nonfinite = Literal["skip", "raise", "ignore"]


@dataclass(frozen=True)
class Update:
    """One step as a pure function: `state, metrics = update(state, batch)`."""

    loss_fn: Callable[[Any, Any, Any], Any]
    optim: optax.GradientTransformationExtraArgs
    mesh: Mesh
    rule: Rule
    trainable: PyTree
    accumulate: int
    precision: Precision | None
    nonfinite: Nonfinite

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        params, frozen = split_model(state.model, self.trainable)
        # Where gradients and optimizer state lie: elsewhere than the parameters, if the
        # rule says so.
        there = place(params, self.mesh, optimizer_rule(self.rule))
        total = jnp.sum(weights(batch))

        def mean_loss(sums: dict[str, Array]) -> Array:
            # By the weight of the whole batch, so that its parts add up to its mean.
            return sums["loss"] / jnp.where(total == 0, 1, total).astype(sums["loss"].dtype)

        def objective(
            params: PyTree, part: PyTree, model_state: PyTree, key: Array
        ) -> tuple[Array, Any]:
            model = eqx.combine(params, frozen)
            sums, model_state = self._measure(model, model_state, part, key, there)
            loss = mean_loss(sums)
            if state.loss_scale is not None:
                loss = loss * state.loss_scale.scale
            return loss, (sums, model_state)

        def gradient(part: PyTree, model_state: PyTree, key: Array) -> tuple[Any, PyTree]:
            grads, (sums, model_state) = jax.grad(objective, has_aux=True)(
                params, part, model_state, key
            )
            return (grads, sums), model_state

        key = jax.random.fold_in(state.key, state.step)
        if self.accumulate == 1:
            rows = filter_shard(batch, batch_sharding(self.mesh))
            (grads, sums), model_state = gradient(rows, state.model_state, key)
        else:
            parts = split_rows(batch, self.accumulate, self.mesh)
            (grads, sums), model_state = add_up(gradient, parts, state.model_state, key)
        if state.loss_scale is not None:
            grads = unscale(grads, state.loss_scale.scale)

        old = filter_shard(params, there), state.opt_state, state.model_state

        def update() -> tuple[PyTree, PyTree, PyTree]:
            params, opt_state, _ = old
            updates, opt_state = self.optim.update(
                grads, opt_state, params, value=mean_loss(sums)
            )
            # Optax's own, which leaves parameters of the type that they are of.
            return optax.apply_updates(params, updates), opt_state, model_state

        nonfinite, loss_scale = jnp.zeros((), jnp.int32), state.loss_scale
        if self.nonfinite == "ignore":
            params, opt_state, model_state = update()
        else:
            finite = all_finite(grads, there, self.mesh) & jnp.isfinite(sums["loss"])
            params, opt_state, model_state = update_if(finite, update, old, self.mesh)
            nonfinite = 1 - finite.astype(jnp.int32)
            if loss_scale is not None and self.precision is not None:
                loss_scale = loss_scale.after(finite, self.precision)
        state = TrainState(
            step=state.step + 1,
            model=eqx.combine(params, frozen),
            opt_state=opt_state,
            key=state.key,
            model_state=model_state,
            loss_scale=loss_scale,
        )
        return state, Metrics(sums, total, nonfinite)

    def _measure(
        self, model: PyTree, model_state: PyTree, batch: PyTree, key: Array, there: PyTree
    ) -> tuple[dict[str, Array], PyTree]:
        """Call the user's loss, on the mesh, and sum what it returns over the batch."""
        storage = place(model, self.mesh, self.rule)
        # A copy, because Equinox makes what is set invalid, and the step keeps the old.
        model_state = jax.tree.map(lambda leaf: leaf, model_state)
        with on_mesh(model, storage, there, batch, self.mesh, self.precision) as (model, x):
            out = self.loss_fn(with_state(model, model_state), x, key)
        values = [*out] if isinstance(out, tuple) else [out]
        if model_state is not None:
            model_state = values.pop()
            if not isinstance(model_state, eqx.nn.State):
                raise TypeError(
                    f"the last that the loss function returned is a "
                    f"{type(model_state).__name__}; for a model with state, return "
                    "(losses, state) or (losses, metrics, state)."
                )
        if len(values) not in (1, 2):
            raise TypeError(
                f"the loss function returned {len(values)} things besides a model's state; "
                "return losses, or losses and a dict of metrics."
            )
        losses, metrics = values if len(values) == 2 else (*values, {})
        check_names("the loss function's metrics", metrics, "loss", "nonfinite")
        sums = sum_over_batch({**metrics, "loss": losses}, batch, self.mesh)
        return sums, model_state


@contextlib.contextmanager
def on_mesh(
    model: PyTree,
    storage: PyTree[NamedSharding | None],
    update: PyTree[NamedSharding | None],
    batch: PyTree,
    mesh: Mesh,
    precision: Precision | None,
) -> Iterator[tuple[PyTree, PyTree]]:
    """A model and a batch as user code gets them, which knows the mesh meanwhile."""
    dtype = None if precision is None else precision.compute
    if dtype is not None:
        # Weights are added up.
        kept = {"weight": batch["weight"]} if has_weight(batch) else {}
        batch = {**cast(batch, dtype), **kept} if kept else cast(batch, dtype)
    with (
        gathered(model, storage, update, dtype) as model,
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield model, batch


def check_names(what: str, values: Any, *taken: str) -> None:
    """Raise unless values are metrics by name, none of them one of the step's own."""
    if not isinstance(values, Mapping):
        kind = "an array" if isinstance(values, jax.Array) else f"a {type(values).__name__}"
        raise TypeError(f"{what} is {kind}; return a dict of metrics by name.")
    for name in taken:
        if name in values:
            raise ValueError(
                f"a metric is named {name!r}, which the step says itself; give it another "
                "name, or leave it out."
            )


def has_weight(batch: PyTree) -> bool:
    """Whether a batch says how much each of its examples counts."""
    return isinstance(batch, Mapping) and "weight" in batch


def weights(batch: PyTree) -> Float[Array, " batch"]:
    """How much each example of a batch counts: once, unless the batch says otherwise."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if not has_weight(batch):
        return jnp.ones(rows, jnp.float32)
    if batch["weight"].shape != (rows,):
        raise ValueError(
            f"the batch's 'weight' has shape {batch['weight'].shape} for {rows} examples; "
            "give one number for each, or use another name."
        )
    return batch["weight"].astype(jnp.float32)


def sum_over_batch(
    values: Mapping[str, Any], batch: PyTree, mesh: Mesh
) -> dict[str, Float[Array, ""]]:
    """Sum values over a batch by weight; a scalar counts as the mean that it is.

    What has weight 0 does not count, whatever it is.
    """
    weight, sums = weights(batch), {}
    for name, value in values.items():
        if not eqx.is_array_like(value):
            raise TypeError(
                f"{name} is a {type(value).__name__}; return an array with one value per "
                "example, or a scalar."
            )
        value = jnp.asarray(value)
        if value.shape not in ((), weight.shape):
            raise ValueError(
                f"{name} has shape {value.shape} for a batch of {weight.shape[0]}; return "
                f"one value per example, of shape {weight.shape}, or a scalar."
            )
        if value.shape:
            value = filter_shard(value, batch_sharding(mesh))
        # Sums of many need float32 at least.
        if value.dtype != jnp.float64:
            value = value.astype(jnp.float32)
        weighted = value * weight.astype(value.dtype)
        sums[name] = jnp.sum(jnp.where(weight == 0, 0, weighted))
    return sums


def split_rows(batch: PyTree, parts: int, mesh: Mesh) -> PyTree:
    """Give a batch a leading axis of parts, each device keeping the rows that it has.

    Part `i` is every `parts`-th row from row `i`: consecutive rows would all be on a few
    of the devices.
    """

    def one(leaf: Array) -> Array:
        return jnp.swapaxes(leaf.reshape(-1, parts, *leaf.shape[1:]), 0, 1)

    return filter_shard(jax.tree.map(one, batch), batch_sharding(mesh, stacked=True))


def add_up(
    gradient: Callable[..., tuple[PyTree, PyTree]],
    parts: PyTree,
    model_state: PyTree,
    key: Array,
) -> tuple[PyTree, PyTree]:
    """Add up gradients and sums over the parts of a batch; hand the model's state on.

    `gradient(part, model_state, key)` returns `(what to add up, the new model's state)`.
    """

    def body(
        carry: tuple[PyTree, PyTree], numbered: tuple[Array, PyTree]
    ) -> tuple[tuple[PyTree, PyTree], None]:
        total, model_state = carry
        index, part = numbered
        new, model_state = gradient(part, model_state, jax.random.fold_in(key, index))
        return (jax.tree.map(jnp.add, total, new), model_state), None

    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes, _ = jax.eval_shape(gradient, first, model_state, key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    count = jax.tree.leaves(parts)[0].shape[0]
    return jax.lax.scan(body, (zeros, model_state), (jnp.arange(count), parts))[0]


def unscale(grads: PyTree, scale: Float[Array, ""]) -> PyTree:
    """Divide by the scale of the loss, which may be too large for the gradients' type."""

    def one(grad: Array) -> Array:
        wide = widen(grad)
        return (wide / scale.astype(wide.dtype)).astype(grad.dtype)

    return jax.tree.map(one, grads)


def all_finite(tree: PyTree, storage: PyTree[NamedSharding], mesh: Mesh) -> Bool[Array, ""]:
    """Whether no element is infinite or nan: each device looks at what it stores."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.array(True)
    specs = [place.spec for place in jax.tree.leaves(storage)]
    used = {axis for spec in specs for axis in jax.tree.leaves(tuple(spec))}
    # In the mesh's order: that of a set differs from one process to the next.
    axes = tuple(axis for axis in mesh.axis_names if axis in used)

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


def update_if(
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
