"""How a mixture of experts runs on devices; the words are those of `_moe.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from ..sharding._placement import constrain
from ..transforms._shard_map import filter_shard_map


class Devices(NamedTuple):
    """The devices along the axis `expert`, and how code runs on them.

    - `size`: their number.
    - `parts`: the number of parts of the arrays that the code sees one of: all in code
        that is per device already, otherwise 1.
    - `batch_axes`: the axes that split the batch, if the code is per device along these.
    """

    size: int
    parts: int
    batch_axes: tuple[str, ...]

    def run(
        self,
        fn: Callable[..., Any],
        in_specs: tuple[P, ...],
        out_specs: PyTree,
        *args: PyTree,
    ) -> Any:
        """Call a function per device."""
        if self.size > self.parts:
            fn = filter_shard_map(fn, None, in_specs, out_specs, axis_names={"expert"})
        return fn(*args)

    def constrain(self, tree: PyTree) -> PyTree:
        """Keep arrays, and so their gradients, split over the devices.

        For what goes into a branch of `jax.lax.cond` in a loop: XLA would gather its
        gradient there, which is zero in the other branch.
        """

        def split(leaf: Any) -> Any:
            if not eqx.is_array(leaf):
                return leaf
            return constrain(leaf, P("expert", *[P.UNCONSTRAINED] * (leaf.ndim - 1)))

        return jax.tree.map(split, tree) if self.size > self.parts else tree

    def exchange(self, rows: Array, split: int, whole: int) -> Array:
        """Have the devices split another dim of some rows.

        XLA makes an all-to-all of the constraint, and leaves the examples of the batch on
        their devices. An all-to-all in code that is per device along `expert`, and not
        along the axes of the batch, would have it gather them.
        """
        if self.size == 1:
            return rows
        if self.size == self.parts:
            return lax.all_to_all(rows, "expert", split, whole)
        spec: list[Any] = [P.UNCONSTRAINED] * rows.ndim
        spec[split], spec[whole] = "expert", None
        return constrain(rows, P(*spec))

    def longest(self, queue: Int[Array, ""]) -> Int[Array, ""]:
        """The longest of a length, over all examples of the batch."""
        queue = _max_over_batch(queue)
        return lax.pmax(queue, self.batch_axes) if self.batch_axes else queue


@custom_vmap
def _max_over_batch(value: Int[Array, ""]) -> Int[Array, ""]:
    """The maximum over all examples that `jax.vmap` runs over.

    It makes the condition of `jax.lax.cond` one for the whole batch. With a condition for
    each example, both branches would be computed.
    """
    return value


@_max_over_batch.def_vmap
def _(axis_size: int, in_batched: Any, value: Int[Array, " batch"]) -> Any:
    return _max_over_batch(jnp.max(value)), False
