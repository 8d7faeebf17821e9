"""What a compiled step is made of: pure functions, on PyTrees that lie on a mesh."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from .mesh import batch_sharding
from .sharding import compute_sharding, filter_shard


def weights(batch: PyTree) -> Float[Array, " batch"]:
    """How much each example of a batch counts: once, unless the batch says otherwise."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if not isinstance(batch, Mapping) or "weight" not in batch:
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


def gather(params: PyTree, storage: PyTree[NamedSharding]) -> PyTree:
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
