"""Code that is per device along one mesh axis; the other axes are left to the compiler."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from ..sharding._spec import check_axis


def find_axis(name: str, axis: str) -> tuple[AbstractMesh | None, int]:
    """The mesh to split arrays over, and the number of devices along an axis.

    The mesh is `None` if there is one device, or if the code is per device already.

    **Raises:**

    `ValueError` if the mesh in context has no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None, 1
    check_axis(axis, mesh, name)
    size = mesh.shape[axis]
    return None if size == 1 or axis in mesh.manual_axes else mesh, size


def run_per_device(
    fn: Callable[..., Any],
    mesh: AbstractMesh | None,
    axis: str,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: Any,
    *args: Any,
) -> Any:
    """Call `fn(rank, *args)` on each device's parts of the arguments.

    Without a mesh, the arguments are the device's parts already.
    """
    if mesh is None:
        return fn(jax.lax.axis_index(axis), *args)
    # The ranks are passed in, because JAX 0.10.1 cannot lower an axis_index in per-device
    # code that is inside other per-device code.
    return jax.shard_map(
        lambda ranks, *args: fn(ranks[0], *args),
        mesh=mesh,
        in_specs=(PartitionSpec(axis), *in_specs),
        out_specs=out_specs,
        axis_names={axis},
    )(jnp.arange(mesh.shape[axis], dtype=jnp.int32), *args)


def send_to_next(tree: Any, axis: str, size: int) -> Any:
    """Send arrays to the next device of a ring; return those of the one before."""
    ahead = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ahead), tree)
