"""The guard against steps that are not finite: find them, and keep the old state."""

import collections
import functools as ft
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..sharding._explicit import auto_mesh, constrain_to
from ..sharding._leaves import is_inexact
from ..sharding._mesh import is_on_cpus
from ..sharding._placement import broadcast_prefix
from ..sharding._spec import AnyMesh, spec_axes
from ..transforms._dtypes import at_least_float32
from ._state import StateLayout
from .rewrite._jaxprs import equations

#: Arrays with fewer elements on each device are checked together: with a reduction for
#: each, a small model would take longer to check than to update. (On a GPU, an array with
#: more has a kernel of its own.)
_SMALL_ON_CPUS, _SMALL_ON_GPUS = 2**13, 2**20
#: How many small gradients are read in one kernel, with their parameters and the
#: optimizer's arrays for them. XLA reads no more than 96 arrays in a kernel.
_TOGETHER = 20
#: What makes an update too expensive to be computed twice.
_EXPENSIVE = {"dot_general", "scan", "while", "cholesky", "eigh", "lu", "qr", "svd"}


def guard_update(
    update: Callable[[], PyTree],
    old: PyTree,
    grads: PyTree,
    loss: Float[Array, ""],
    layout: StateLayout,
    *,
    check: bool,
    is_step: Bool[Array, ""] | None,
) -> tuple[PyTree, Bool[Array, ""]]:
    """The values that a step writes: the new ones, or the old ones.

    They are the old ones if the update is not finite, or no example's loss counts.

    **Arguments:**

    - `update`: computes the new parameters, optimizer state and model state.
    - `old`: these three before the step.
    - `grads`, `loss`, `layout`: of the step.
    - `check`: whether the update must be finite.
    - `is_step`: whether the loss of any example counts; `None` if all count.

    **Returns:**

    The new or the old values, bit for bit; and whether the loss, the gradients and the
    update are finite, or need not be.
    """
    if not check and is_step is None:
        return update(), jnp.array(True)
    arrays, static = eqx.partition(old, eqx.is_array)
    # Traced once, and called twice.
    compute = jax.jit(lambda: eqx.filter(update(), eqx.is_array))
    new, finite = compute(), jnp.array(True)
    if check:
        places = layout.update, layout.opt_state, layout.replicated
        finite = gradients_fit(grads, loss, layout, _changes(new, arrays, places))
    writes = finite
    if is_step is not None:
        writes, finite = finite & is_step, finite | ~is_step
    if is_on_cpus(layout.mesh):
        # With a select, XLA:CPU would copy the optimizer's state, because it has no
        # kernel that writes several results at once. A cheap update of large arrays is
        # computed again, in the place of the old values, rather than kept until it is
        # known to be finite; but not if it has effects, such as printing. Small arrays
        # are kept: to compile their update again takes longer than to copy them.
        jaxpr = jax.make_jaxpr(compute)()
        expensive = any(eqn.primitive.name in _EXPENSIVE for eqn in equations(jaxpr))
        is_kept = expensive or jaxpr.effects or _are_small(grads, layout)
        kept = jax.lax.cond(writes, (lambda: new) if is_kept else compute, lambda: arrays)
    else:
        # With a branch, a GPU would wait for the host to decide.
        kept = jax.tree.map(lambda new, old: jnp.where(writes, new, old), new, arrays)
    return eqx.combine(kept, static), finite


def _are_small(grads: PyTree, layout: StateLayout) -> bool:
    """True if gradients have few elements on each device, on average."""
    sizes = [
        math.prod(sharding.shard_shape(grad.shape))
        for grad, _, sharding in _changes(grads, None, layout.update)
    ]
    return sum(sizes) < len(sizes) * _SMALL_ON_CPUS


#: A new array, the old one that it replaces (`None` for a gradient), and their sharding.
Change = tuple[Array, Array | None, NamedSharding]


def gradients_fit(
    grads: PyTree, loss: Float[Array, ""], layout: StateLayout, more: Sequence[Change] = ()
) -> Bool[Array, ""]:
    """True if the loss and the gradients are finite, and `more` arrays if there are any."""
    changes = [*_changes(grads, None, layout.update), *more]
    return all_finite(changes, auto_mesh(layout.mesh)) & jnp.isfinite(loss)


def _changes(
    new: PyTree, old: PyTree, shardings: PyTree[NamedSharding | None]
) -> list[Change]:
    """The arrays of a PyTree; `old` is `None` for gradients."""
    arrays = [x for x in jax.tree.leaves(new) if eqx.is_array(x)]
    olds = jax.tree.leaves(old) or [None] * len(arrays)
    return [*zip(arrays, olds, broadcast_prefix(shardings, new), strict=True)]  # pyright: ignore


def all_finite(changes: Sequence[Change], mesh: AnyMesh) -> Bool[Array, ""]:
    """True if no new array is infinite or nan where the old one was finite.

    (The best loss so far, in the state of an optimizer, may be infinite at first.) Each
    device checks its own shards.
    """
    # XLA fails on per-device code whose arguments are all of size 0.
    found = [change for change in changes if is_inexact(change[0]) and change[0].size]
    if not found:
        return jnp.array(True)
    return (_finite_on_cpus if is_on_cpus(mesh) else _finite_on_gpus)(found, mesh)


def _finite_on_cpus(found: Sequence[Change], mesh: AnyMesh) -> Bool[Array, ""]:
    """As `all_finite`, with little code.

    Each operand of per-device code takes XLA:CPU two milliseconds to compile; and one
    kernel for a deep model takes longer to compile than its update.
    """
    products, specs = _products_with_zero(found)
    products = jax.lax.optimization_barrier(products)

    def count_bad(products: list[Array]) -> Int[Array, ""]:
        bad = [jnp.isnan(each) for each in products]
        return _count(bad, _SMALL_ON_CPUS, _used_axes(specs, mesh))

    count = jax.shard_map(
        count_bad, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()
    )
    return count(products) == 0


def _finite_on_gpus(found: Sequence[Change], mesh: AnyMesh) -> Bool[Array, ""]:
    """As `all_finite`, with few kernels and little memory."""
    new, old, shardings = map(list, zip(*found))
    specs = [sharding.spec for sharding in shardings]
    places = _places(new, old, specs)
    axes = _used_axes(specs, mesh)

    def count_bad(new: list[Array], old: list[Array | None]) -> Int[Array, ""]:
        together = collections.defaultdict(list)
        for place, leaf, before in zip(places, new, old):
            bad = ~jnp.isfinite(leaf)
            together[place].append(bad if before is None else bad & jnp.isfinite(before))
        masks = [ft.reduce(operator.or_, place) for place in together.values()]
        return _count(masks, _SMALL_ON_GPUS, axes)

    in_specs = specs, [spec if leaf is not None else None for spec, leaf in zip(specs, old)]
    replicated = PartitionSpec()
    count = jax.shard_map(count_bad, mesh=mesh, in_specs=in_specs, out_specs=replicated)
    return count(new, old) == 0


def _count(masks: list[Array], small: int, axes: tuple[str, ...]) -> Int[Array, ""]:
    """In code for each device: the number of reductions, on all, that found something."""
    found = [jnp.any(mask).astype(jnp.int32) for mask in _grouped(masks, small)]
    count = ft.reduce(operator.add, found)
    return jax.lax.psum(count, axes) if axes else count


def _used_axes(specs: Sequence[PartitionSpec], mesh: AnyMesh) -> tuple[str, ...]:
    """The axes that split an array, in the order of the mesh.

    The order of a set would differ from one process to the next.
    """
    used = {axis for spec in specs for axis in spec_axes(spec)}
    return tuple(axis for axis in mesh.axis_names if axis in used)


def _places(
    new: Sequence[Array], old: Sequence[Array | None], specs: Sequence[PartitionSpec]
) -> list[tuple[Any, ...]]:
    """A name for each array, which it shares with those to read in the same pass.

    These are a gradient, its parameter and what the optimizer keeps for it: the arrays of
    one kind come in the order of the gradients of that kind.
    """
    kinds = [(leaf.shape, spec) for leaf, spec in zip(new, specs)]
    gradients = collections.Counter(kind for kind, leaf in zip(kinds, old) if leaf is None)
    seen: collections.Counter[Any] = collections.Counter()
    places = []
    for kind in kinds:
        places.append((kind, seen[kind] % max(gradients[kind], 1)))
        seen[kind] += 1
    return places


def _products_with_zero(
    changes: Sequence[Change],
) -> tuple[list[Array], list[PartitionSpec]]:
    """For each group of changes, an array: 0 where all are finite, else nan; and its spec.

    The arrays of one place are a group, and so are those of `_TOGETHER` places of one kind,
    if they are small.
    """
    new, old, shardings = zip(*changes)
    places = _places(new, old, [sharding.spec for sharding in shardings])
    groups: dict[Any, list[Any]] = collections.defaultdict(list)
    where: dict[Any, NamedSharding] = {}
    for (kind, place), leaf, before, sharding in zip(places, new, old, shardings):
        is_small = math.prod(sharding.shard_shape(leaf.shape)) < _SMALL_ON_CPUS
        size = _as_real(leaf)
        group = kind, size.dtype, place // _TOGETHER if is_small else place
        groups[group].append((size, None if before is None else _as_real(before)))
        where[group] = sharding
    products = []
    for group, sharding in where.items():
        # By primitives: `jax.numpy` would trace a function for each.
        product = zero = jax.lax.full(groups[group][0][0].shape, 0, group[1])
        for size, before in groups[group]:
            if before is not None:
                size = jax.lax.select(jax.lax.is_finite(before), size, zero)
            product = jax.lax.mul(product, size)
        products.append(constrain_to(product, sharding))
    return products, [sharding.spec for sharding in where.values()]


def _as_real(x: Array) -> Array:
    """Real numbers that are finite where those of an array are."""
    return at_least_float32(jnp.abs(x) if jnp.iscomplexobj(x) else x)


def _grouped(masks: list[Array], small: int) -> list[Array]:
    """Masks to reduce one by one: the large ones, and one of all small ones together."""
    few = [mask.ravel() for mask in masks if mask.size < small]
    groups = [few[i : i + _TOGETHER] for i in range(0, len(few), _TOGETHER)]
    # Behind barriers, as XLA would reduce each array by itself.
    parts = [jax.lax.optimization_barrier(jnp.concatenate(group)) for group in groups]
    longest = max((part.size for part in parts), default=0)
    padded = [jnp.pad(part, (0, longest - part.size)) for part in parts]
    together = [ft.reduce(operator.or_, padded)] if padded else []
    return [mask for mask in masks if mask.size >= small] + together
