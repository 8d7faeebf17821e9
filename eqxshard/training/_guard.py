"""The guard against steps that are not finite: find them, and keep the old state."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from ..sharding._mesh import is_on_cpus
from ..sharding._spec import spec_axes

#: On CPUs, leaves with fewer elements are checked together: with a reduction for each, a
#: small model would take longer to check than to update.
_SMALL = 2**13
#: Elsewhere, so many leaves of any size are.
_TOGETHER = 64


def all_finite(
    grads: PyTree, shardings: PyTree[NamedSharding | None], mesh: Mesh
) -> Bool[Array, ""]:
    """Whether no gradient is infinite or nan. Each device checks its own shards."""
    # XLA fails on per-device code whose arguments are all of size 0.
    parts = zip(jax.tree.leaves(grads), jax.tree.leaves(shardings), strict=True)
    found = [(leaf, sharding.spec) for leaf, sharding in parts if leaf.size]
    if not found:
        return jnp.array(True)
    leaves, specs = map(list, zip(*found))
    used = {axis for spec in specs for axis in spec_axes(spec)}
    # In the mesh's order: a set's would differ from one process to the next.
    axes = tuple(axis for axis in mesh.axis_names if axis in used)

    def count_bad(leaves: list[Array]) -> Int[Array, ""]:
        bad = jnp.int32(0)
        large, groups = _groups(leaves, is_on_cpus(mesh))
        for leaf in large:
            # A product with 0 is nan if it is not 0. XLA:CPU multiplies by a vector as fast
            # as it can read, and takes three times as long to look at each element.
            rows = leaf.reshape(-1, leaf.shape[-1])
            zeros = jnp.zeros(leaf.shape[-1], leaf.dtype)
            bad += (jnp.sum(rows @ zeros) != 0).astype(jnp.int32)
        for group in groups:
            finite = jnp.concatenate([jnp.isfinite(leaf).ravel() for leaf in group])
            bad += jnp.any(~finite).astype(jnp.int32)
        return jax.lax.psum(bad, axes) if axes else bad

    in_specs, whole = (specs,), PartitionSpec()
    count = jax.shard_map(count_bad, mesh=mesh, in_specs=in_specs, out_specs=whole)
    return count(leaves) == 0


def _groups(leaves: list[Array], on_cpus: bool) -> tuple[list[Array], list[list[Array]]]:
    """The leaves to read one by one, and those that one reduction reads."""
    if not on_cpus:
        # XLA reads them all in the kernel that reduces them, unless there are too many.
        starts = range(0, len(leaves), _TOGETHER)
        return [], [leaves[i : i + _TOGETHER] for i in starts]
    # XLA:CPU first copies what is to be reduced together.
    small = [leaf for leaf in leaves if leaf.size < _SMALL]
    return [leaf for leaf in leaves if leaf.size >= _SMALL], [small] if small else []


def select_update(
    condition: Bool[Array, ""], update: Callable[[], PyTree], old: PyTree, mesh: Mesh
) -> PyTree:
    """The new values if the condition holds; otherwise the old ones, bit for bit."""
    if is_on_cpus(mesh):
        # With a select, XLA:CPU would copy the optimizer's state, because it has no
        # kernel that writes several results at once.
        arrays, static = eqx.partition(old, eqx.is_array)
        new = jax.lax.cond(
            condition, lambda: eqx.filter(update(), eqx.is_array), lambda: arrays
        )
        return eqx.combine(new, static)
    # With a branch, a GPU would wait for the host to decide.
    return jax.tree.map(
        lambda new, old: jnp.where(condition, new, old) if eqx.is_array(new) else old,
        update(),
        old,
    )
