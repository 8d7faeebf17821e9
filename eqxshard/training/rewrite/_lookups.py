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

This is a rewrite of the gradient's jaxpr, because the lookup is in the user's model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ...sharding._explicit import auto_sharding, is_explicit
from ...sharding._mesh import batch_axes
from ...sharding._spec import axes_of, spec_axes
from ._jaxprs import call_equation, is_jaxpr, map_jaxpr, open_jaxpr
from ._rewrite import is_rewriting, run_rewritten
from ._types import erase_types

#: Operations that a gradient passes through on its way from the lookup, unchanged but for
#: its dtype and placement.
_PASS_THROUGH = ("convert_element_type", "sharding_constraint", "copy", "add_any", "add")

_ANY = PartitionSpec.UNCONSTRAINED


def reduce_lookups(
    gradient: Callable[..., Any], shardings: Sequence[NamedSharding]
) -> Callable[..., Any]:
    """Rewrite the lookups in a function that computes gradients.

    **Arguments:**

    - `gradient`: a function of PyTrees of arrays, that returns `(gradients, other)`.
    - `shardings`: one for each gradient, the sharding that it is constrained to.

    **Returns:**

    The same function.
    """
    split = {
        i: sharding
        for i, sharding in enumerate(map(auto_sharding, shardings))
        if not {*batch_axes(_mesh(sharding))}.isdisjoint(spec_axes(sharding.spec))
    }
    typed = any(is_explicit(sharding.mesh) for sharding in shardings)
    if not split and not typed:
        return gradient

    def rewrite(jaxpr: Any) -> Any:
        jaxpr = erase_types(jaxpr) if typed else jaxpr
        return map_jaxpr(lambda jaxpr: _rewrite(jaxpr, split), jaxpr)

    def reduced(*args: Any) -> Any:
        if not is_rewriting():
            return gradient(*args)
        jaxpr, out = jax.make_jaxpr(gradient, return_shape=True)(*args)
        return run_rewritten(rewrite, jaxpr, out, args)[0]

    return reduced


def _mesh(sharding: NamedSharding) -> Mesh:
    return sharding.mesh  # pyright: ignore[reportReturnType]


def _rewrite(jaxpr: Any, outputs: dict[int, NamedSharding]) -> Any:
    """Rewrite the scatters that some of a jaxpr's outputs are sums of."""
    made_by = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    eqns = list(jaxpr.eqns)

    def follow(var: Any, sharding: NamedSharding) -> None:
        index = None if isinstance(var, core.Literal) else made_by.get(var)
        if index is None:
            return
        eqn = eqns[index]
        if eqn.primitive.name in _PASS_THROUGH:
            for source in eqn.invars:
                follow(source, sharding)
        elif eqn.primitive.name == "scatter-add":
            scatter = _LookupGradient.of(eqn, sharding)
            if scatter is not None:
                eqns[index] = call_equation(scatter, eqn)
        elif eqn.primitive.name != "shard_map":
            output = eqn.outvars.index(var)
            eqns[index] = _rewrite_inside(eqn, output, sharding)

    for output, sharding in outputs.items():
        follow(jaxpr.outvars[output], sharding)
    return jaxpr.replace(eqns=eqns)


def _rewrite_inside(eqn: Any, output: int, sharding: NamedSharding) -> Any:
    """Rewrite what an output of a call, or the carry of a loop, is a sum of."""
    part = eqn.params.get("jaxpr")
    if not is_jaxpr(part) or len(open_jaxpr(part).outvars) != len(eqn.outvars):
        return eqn
    # What a loop stacks has one more dim than what its body returns.
    if open_jaxpr(part).outvars[output].aval.shape != eqn.outvars[output].aval.shape:
        return eqn
    inside = map_jaxpr(lambda jaxpr: _rewrite(jaxpr, {output: sharding}), part)
    return eqn.replace(params={**eqn.params, "jaxpr": inside})


@dataclass(frozen=True, eq=False)
class _LookupGradient:
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

    @staticmethod
    def of(eqn: Any, sharding: NamedSharding) -> "_LookupGradient | None":
        """The scatter of an equation, if it is of this kind and its tokens divide."""
        dims = eqn.params["dimension_numbers"]
        table, indices, updates = (var.aval for var in eqn.invars)
        window = [d for d in range(table.ndim) if d not in dims.inserted_window_dims]
        update_dims = dict(zip(window, dims.update_window_dims))
        whole = {d for d, u in update_dims.items() if updates.shape[u] == table.shape[d]}
        rows = [d for d in range(table.ndim) if d not in whole]
        mesh = _mesh(sharding)
        devices = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
        if (
            len(rows) != 1
            or dims.operand_batching_dims
            or indices.ndim < 2
            or 0 in dims.update_window_dims
            or indices.shape[0] % devices
        ):
            return None
        update_dims.pop(rows[0], None)
        names = ("indices_are_sorted", "unique_indices", "mode")
        params = {"dimension_numbers": dims} | {name: eqn.params[name] for name in names}
        return _LookupGradient(sharding, rows[0], update_dims, table.shape, params)

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
            tables = jnp.sum(self._constrain(tables, others, mine, *kept), axis=1)
        else:
            indices = self._constrain(indices, others)
            features = {2 + u: spec[d] for d, u in self.update_dims.items()}
            rest = [features.get(d, _ANY) for d in range(2, updates.ndim)]
            updates = self._constrain(updates, others, (), *rest)
            merged = (x.reshape(len(x), -1, *x.shape[3:]) for x in (indices, updates))
            tables = jax.vmap(self._scatter)(*merged)
        total = jnp.sum(self._constrain(tables, others, *spec), axis=0)
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

    def _scatter(self, indices: Array, updates: Array) -> Array:
        zeros = jnp.zeros(self.shape, updates.dtype)
        return jax.lax.scatter_add(zeros, indices, updates, **self.params)

    def _constrain(self, x: Array, *axes: Any) -> Array:
        entries = [entry if entry is _ANY else entry or None for entry in axes]
        sharding = NamedSharding(self.sharding.mesh, PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(x, sharding)
