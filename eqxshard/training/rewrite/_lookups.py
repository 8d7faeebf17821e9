"""Gradients of lookups in embedding tables, reduced on the way to where tables are stored.

The gradient of `table[tokens]` is a scatter-add of one row per token. Constrained to the
storage sharding of a table that is split over an axis of the batch, XLA may partition it
by moving activation gradients: every device gathers those of the whole batch, which grows
with the number of devices (JAX 0.10 to 0.12, on CPUs and GPUs). Here each device scatters
its own rows, and the bytes it sends do not grow:

- a table split over its features: the activation gradients of each group of devices that
  shares the table change hands once, so that each device gets its own features of all
  tokens of the group (an all-to-all), then tables are summed over the other groups;
- a table split over its rows, or one with fewer rows than a device has tokens: each
  device sums its own tokens into a whole table, and these are reduce-scattered.

Which scatters make gradients of parameters, `_sums.py` finds.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ...sharding._mesh import batch_axes
from ...sharding._spec import axes_of, spec_axes
from ...transforms._dtypes import at_least_float32

_ANY = PartitionSpec.UNCONSTRAINED


def _mesh(sharding: NamedSharding) -> Mesh:
    return sharding.mesh  # pyright: ignore[reportReturnType]


def is_split(sharding: NamedSharding) -> bool:
    """Whether an array is split over axes of the batch."""
    return not {*batch_axes(_mesh(sharding))}.isdisjoint(spec_axes(sharding.spec))


def batch_devices(sharding: NamedSharding) -> int:
    """How many devices split the rows of a batch."""
    mesh = _mesh(sharding)
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


@dataclass(frozen=True, eq=False)
class LookupGradient:
    """A scatter-add of one slice per token into a table, as each device can do its part.

    Of the table's dims, `row` is the one that tokens index; a slice has all others whole.
    Of the batch's axes, the table is split over `mine` and summed over `others`.
    """

    sharding: NamedSharding
    row: int
    #: For each other dim of the table, the same dim of the updates.
    update_dims: dict[int, int]
    shape: tuple[int, ...]
    params: dict[str, Any]
    #: What to sum over devices in.
    dtype: Any

    @staticmethod
    def of(eqn: Any, sharding: NamedSharding, dtype: Any) -> "LookupGradient | None":
        """The scatter of an equation, if it is of this kind and its tokens divide.

        If the table is whole on each device, XLA does the same in its own type, which is
        float32, and sums a table that makes the logits, too, twice.
        """
        dims = eqn.params["dimension_numbers"]
        table, indices, updates = (var.aval for var in eqn.invars)
        window = [d for d in range(table.ndim) if d not in dims.inserted_window_dims]
        update_dims = dict(zip(window, dims.update_window_dims))
        whole = {d for d, u in update_dims.items() if updates.shape[u] == table.shape[d]}
        rows = [d for d in range(table.ndim) if d not in whole]
        if (
            len(rows) != 1
            or dims.operand_batching_dims
            or indices.ndim < 2
            or 0 in dims.update_window_dims
            or indices.shape[0] % batch_devices(sharding)
            or (dtype is None and not is_split(sharding))
        ):
            return None
        update_dims.pop(rows[0], None)
        return LookupGradient(
            sharding, rows[0], update_dims, table.shape, eqn.params, dtype or updates.dtype
        )

    def __call__(
        self,
        table: Float[Array, "..."],
        indices: Int[Array, "tokens ..."],
        updates: Float[Array, "tokens ..."],
    ) -> Float[Array, "..."]:
        spec = [axes_of(entry) for entry in self.sharding.spec]
        spec += [()] * (len(self.shape) - len(spec))
        of_batch = batch_axes(_mesh(self.sharding))
        mine = tuple(axis for axis in of_batch if axis in spec_axes(self.sharding.spec))
        others = tuple(axis for axis in of_batch if axis not in mine)
        indices, updates = (self._by_device(x, others, mine) for x in (indices, updates))
        tokens = math.prod(indices.shape[2:-1])
        if tokens > self.shape[self.row] or not {*mine}.isdisjoint(spec[self.row]):
            tables = jax.vmap(jax.vmap(self._scatter))(indices, updates)
            kept = [tuple(a for a in axes if a not in mine) for axes in spec]
            tables = self._sum(self._constrain(tables, others, mine, *kept), 1)
        else:
            indices = self._constrain(indices, others)
            features = {2 + u: spec[d] for d, u in self.update_dims.items()}
            rest = [features.get(d, _ANY) for d in range(2, updates.ndim)]
            updates = self._constrain(updates, others, (), *rest)
            merged = (x.reshape(len(x), -1, *x.shape[3:]) for x in (indices, updates))
            tables = jax.vmap(self._scatter)(*merged)
        total = self._sum(self._constrain(tables, others, *spec), 0)
        return table + jax.lax.with_sharding_constraint(total, self.sharding)

    def _by_device(self, x: Array, others: tuple[str, ...], mine: tuple[str, ...]) -> Array:
        """Split the tokens over `others`, then over `mine`, then each device's own."""
        sizes, of_batch = self.sharding.mesh.shape, batch_axes(_mesh(self.sharding))
        x = x.reshape(*(sizes[axis] for axis in of_batch), -1, *x.shape[1:])
        order = [of_batch.index(axis) for axis in (*others, *mine)]
        x = x.transpose(*order, *range(len(order), x.ndim))
        count = math.prod(sizes[axis] for axis in others)
        x = x.reshape(count, -1, *x.shape[len(order) :])
        return self._constrain(x, others, mine, *[_ANY] * (x.ndim - 2))

    def _sum(self, tables: Array, dim: int) -> Array:
        # Without the cast to float32 of `jnp.sum`.
        return jax.lax.reduce_sum(tables.astype(self.dtype), [dim])

    def _scatter(self, indices: Array, updates: Array) -> Array:
        updates = at_least_float32(updates)
        zeros = jnp.zeros(self.shape, updates.dtype)
        return scatter_rows(self.params, zeros, indices, updates)

    def _constrain(self, x: Array, *axes: Any) -> Array:
        entries = [entry if entry is _ANY else entry or None for entry in axes]
        sharding = NamedSharding(self.sharding.mesh, PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(x, sharding)


def scatter_rows(
    params: dict[str, Any], table: Array, indices: Array, updates: Array
) -> Array:
    """A scatter-add with the parameters of an equation, whatever the types."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    same = {name: params[name] for name in names}
    return jax.lax.scatter_add(table, indices, updates, **same)
