"""Rings of devices: those along a mesh axis, each of which sends to the next."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import PyTree

from .._errors import UsageError
from ..sharding._spec import AXES, check_axis
from ..sharding._text import nearest_multiples


class Ring(NamedTuple):
    """The devices along a mesh axis; the other axes are left to the compiler.

    - `mesh`: the mesh to split arrays over; `None` if they are whole, or split already.
    - `axis`, `size`: the mesh axis of the ring, and its number of devices.
    """

    mesh: AbstractMesh | None
    axis: str
    size: int

    def run(
        self,
        fn: Callable[..., Any],
        in_specs: tuple[PartitionSpec, ...],
        out_specs: Any,
        *args: Any,
    ) -> Any:
        """Call `fn(rank, *args)` on each device's parts; one device has the rank `None`."""
        if self.size == 1:
            return fn(None, *args)
        if self.mesh is None:
            return fn(jax.lax.axis_index(self.axis), *args)
        # The ranks are passed in, because JAX 0.10.1 cannot lower an axis_index in
        # per-device code that is inside other per-device code.
        return jax.shard_map(
            lambda ranks, *args: fn(ranks[0], *args),
            mesh=self.mesh,
            in_specs=(PartitionSpec(self.axis), *in_specs),
            out_specs=out_specs,
            axis_names={self.axis},
        )(jnp.arange(self.size, dtype=jnp.int32), *args)

    def send(self, tree: PyTree) -> PyTree:
        """Send arrays to the next device; return those of the one before."""
        return self.permute(tree, lambda i: (i + 1) % self.size)

    def permute(self, tree: PyTree, to: Callable[[int], int]) -> PyTree:
        """Send arrays from each device to the device `to(i)`."""
        pairs = [(i, to(i)) for i in range(self.size)]
        if all(i == j for i, j in pairs):
            return tree
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def check_divides(self, count: int, what: str) -> None:
        """Raise `ValueError` unless a number of something divides over the ring.

        **Arguments:**

        - `count`: the number.
        - `what`: what the error calls the things that are counted, such as `rows`.
        """
        if count % self.size:
            raise UsageError(
                f"the {count} {what} do not divide over {self.axis}={self.size}; use a "
                f"multiple of {self.size}, such as {nearest_multiples(count, self.size)}."
            )


def find_ring(name: str, axis: str) -> Ring:
    """The ring of an axis of the mesh in context, of size 1 if there is no mesh.

    It also has size 1 if the mesh lacks an axis of `make_mesh`.

    **Raises:**

    `ValueError` if the mesh lacks another axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return Ring(None, axis, 1)
    if axis not in AXES:
        check_axis(axis, mesh, name)
    size = mesh.shape.get(axis, 1)
    return Ring(None if size == 1 or axis in mesh.manual_axes else mesh, axis, size)
