"""The rules against what XLA splits wrongly: `guard_partitioner` and `sum_tables_whole`.

Plain `jax.jit` has these faults, on CPUs and on GPUs (seen with JAX 0.10.2 and 0.12.0; the
page "What XLA gets wrong" has the reports):

- The gradient of a convolution's weight is a sum over the examples and the spatial dims. If
    the convolution has groups, or a spatial dim is split, XLA sums it over the axes of the
    mesh that split nothing, too: the gradient comes out times their size. And for a
    convolution with groups, each device gathers the whole batch.

    So these are computed per device along the axes of the batch. Where other axes may split
    a spatial dim while some, or a part of one, split nothing, spatial dims are gathered
    first.
- To split a dim that does not divide, XLA pads it. On a mesh with an axis that splits
    nothing, it scatters the padding of a scatter's updates, too, into row 0. On others it
    may abort (gradients of sorts of rows).

    So these are padded here, with updates that change nothing.
- The gradient of `table[tokens]` is a scatter-add of one row per token. If it is
    constrained to where a table is stored that is split over an axis of the batch, XLA may
    move activation gradients: every device gathers those of the whole batch.

    So it is constrained to whole first: each device scatters the rows of its own tokens,
    and tables are summed. That is one sum of the whole table where XLA makes no
    reduce-scatter of it, so all other gradients are left alone.

Where XLA would be right, the program stays as it is, or sends no more than before. Each
guard can go when XLA is mended.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ..._jax import Literal, bind, mesh_of
from ...compiled._findings import REWRITTEN
from ...sharding._explicit import auto_mesh, is_explicit, to_auto
from ...sharding._mesh import batch_axes
from ...sharding._placement import compute_sharding
from ...sharding._spec import AnyMesh
from ._jaxprs import Apply, Rule, jaxprs_in, open_jaxpr, varying_like

_ANY = PartitionSpec.UNCONSTRAINED
_SCATTERS = {"scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}


#: The convolution of two arrays, by the parameters of an equation.
_Convolve = Callable[..., Array]


class _Place:
    """A mesh that code runs on. If the code is per device along some axes, they are Manual.

    - `convolve`: the convolution for its devices.
    - `left`: the axes that are left to XLA.
    - `sizes`: those of them that XLA may split arrays over, with their sizes.
    - `rows`: those of these that split the batch.
    - `shards`: the number of parts of a batch.
    - `devices`: the number of parts that an array may have.
    """

    def __init__(self, mesh: AnyMesh, convolve: _Convolve):
        manual = mesh.abstract_mesh.manual_axes
        self.mesh, self.convolve = mesh, convolve
        self.is_outermost = not manual
        self.left = [axis for axis in mesh.axis_names if axis not in manual]
        self.sizes = {axis: mesh.shape[axis] for axis in self.left if mesh.shape[axis] > 1}
        self.rows = tuple(axis for axis in batch_axes(mesh) if axis in self.sizes)
        self.shards = math.prod(self.sizes[axis] for axis in self.rows)
        self.devices = math.prod(self.sizes.values())

    def constrain(self, x: Array, spec: Sequence[Any]) -> Array:
        """Keep the dims with `None` in a spec whole; XLA may split the others."""
        place: Any = PartitionSpec(*spec)
        if self.is_outermost:
            place = NamedSharding(self.mesh, place)
        return jax.lax.with_sharding_constraint(x, place)


def guard_partitioner(mesh: AnyMesh, convolve: _Convolve) -> Rule:
    """The rule for convolutions and scatters that XLA would split wrongly.

    **Arguments:**

    - `mesh`: the mesh that the program runs on, with Auto axes.
    - `convolve`: the convolution for its devices, of two arrays and the parameters of an
        equation.
    """
    outermost = _Place(mesh, convolve)

    def rule(jaxpr: Any) -> dict[int, Apply]:
        found = {}
        for i, eqn in enumerate(jaxpr.eqns):
            guard = _GUARDS.get(eqn.primitive.name)
            if guard is None:
                continue
            inside = mesh_of(eqn)
            per_device = bool(inside.manual_axes)
            place = _Place(auto_mesh(inside), convolve) if per_device else outermost
            fn = guard(eqn, place) if place.sizes else None
            if fn is not None:
                found[i] = partial(_apply, eqn, place, fn)
        return found

    return rule


def _apply(eqn: Any, place: _Place, fn: Callable[..., Array], inputs: list[Any]) -> Any:
    """Call a function on Auto axes."""
    with jax.named_scope(REWRITTEN):
        with jax.sharding.use_abstract_mesh(place.mesh.abstract_mesh):
            out = fn(*to_auto(inputs))
        aval = eqn.outvars[0].aval
        if is_explicit(mesh_of(eqn)):
            # Types of Explicit axes are left in programs that have per-device code on them.
            out = jax.sharding.reshard(out, aval.sharding.spec)
        return [varying_like(out, aval)]


def _guard_scatter(eqn: Any, place: _Place) -> Callable[..., Array] | None:
    params, update = eqn.params, eqn.invars[2].aval
    dims = params["dimension_numbers"]
    # The last dim has the numbers of one index. Dims that both operands have, as in
    # `jnp.take_along_axis`, are not scattered.
    *sizes, _ = eqn.invars[1].aval.shape
    # The first of several dims has the rows, which only the axes of the batch split.
    counts = [place.shards if len(sizes) > 1 else place.devices]
    counts += [place.devices if place.devices > place.shards else 1] * len(sizes)
    whole = dims.scatter_indices_batching_dims
    more = [
        0 if size == 1 or dim in whole else -size % count
        for dim, (size, count) in enumerate(zip(sizes, counts))
    ]
    if not any(more) or not update.size:
        return None
    of_update = [d for d in range(update.ndim) if d not in dims.update_window_dims]
    neutral = _neutral(eqn.primitive.name, update.dtype)

    def scatter(x: Array, indices: Array, updates: Array) -> Array:
        indices = _pad(indices, 0, dict(enumerate(more)))
        updates = _pad(updates, neutral, dict(zip(of_update, more, strict=True)))
        promises = {"unique_indices": False, "indices_are_sorted": False}
        return eqn.primitive.bind(x, indices, updates, **params | promises)

    return scatter


def _pad(x: Array, value: Any, more: Mapping[int, int]) -> Array:
    """Add entries at the end of some dims."""
    pads = [(0, more.get(dim, 0), 0) for dim in range(x.ndim)]
    return jax.lax.pad(x, jnp.full((), value, x.dtype), pads)


def _neutral(scatter: str, dtype: Any) -> Any:
    """The update that changes nothing."""
    is_least = scatter == "scatter-min"
    if scatter not in ("scatter-min", "scatter-max"):
        return int(scatter == "scatter-mul")
    if jnp.issubdtype(dtype, jnp.bool_):
        return is_least
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.inf if is_least else -jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.max if is_least else limits.min


class _Split(NamedTuple):
    """How the devices along the axes of the batch share a convolution.

    - `lhs`, `rhs`, `out`: the dims of its inputs and its result that are split; `None` for
        none.
    - `params`: the parameters of the convolution on each device.
    - `sums`: whether the devices have parts of a sum.
    """

    lhs: int | None
    rhs: int | None
    out: int | None
    params: dict[str, Any]
    sums: bool = False


def _guard_convolution(eqn: Any, place: _Place) -> Callable[..., Array] | None:
    params, (lhs, rhs) = eqn.params, (x.aval.shape for x in eqn.invars)
    dims = params["dimension_numbers"]
    # Examples are the first dim in the usual layouts, and gradients of weights sum them.
    keeps_examples = dims.lhs_spec[0] == dims.out_spec[0] == 0
    sums_examples = dims.lhs_spec[1] == dims.rhs_spec[1] == 0
    has_groups = params["feature_group_count"] * params["batch_group_count"] > 1

    def splits_rightly(place: _Place) -> bool:
        # One axis, if XLA splits no dim over a part of it.
        divides = not any(size % place.devices for size in (*lhs, *rhs))
        return divides and len(place.sizes) < 2

    has_others = len(place.sizes) > len(place.rows) and not splits_rightly(place)
    if not has_groups and (keeps_examples or not has_others):
        return None
    split = _find_split(lhs, params, keeps_examples, sums_examples, place.shards)
    if split is None and keeps_examples:
        return None
    if split is None and has_groups:
        split = _Split(None, None, None, params)

    # XLA splits convolutions of examples rightly; of others, it may have some first dims.
    by_example = keeps_examples and split is not None and split.out == dims.out_spec[0]
    free = 1 if params["batch_group_count"] > 1 else 2

    def convolve(lhs: Array, rhs: Array, place: _Place, params: dict[str, Any]) -> Array:
        if not by_example and not splits_rightly(place):
            lhs = place.constrain(lhs, _whole_after(free, dims.lhs_spec))
            rhs = place.constrain(rhs, _whole_after(free, dims.rhs_spec))
        return place.convolve(lhs, rhs, **params)

    if split is None or not place.rows:
        return partial(convolve, place=place, params=params)

    # Other axes are left to XLA; but not inside per-device code, as JAX 0.12 aborts if axes
    # become Manual out of the mesh's order.
    per_device_axes = {*(place.rows if place.is_outermost else place.left)}

    def per_device(lhs: Array, rhs: Array) -> Array:
        inside = _Place(jax.sharding.get_abstract_mesh(), place.convolve)
        out = convolve(lhs, rhs, inside, split.params)
        return out[None] if split.sums else out

    def run(lhs: Array, rhs: Array) -> Array:
        lhs_spec, rhs_spec, out_spec = (_split_at(dim, place.rows) for dim in split[:3])
        out = jax.shard_map(
            per_device,
            mesh=place.mesh if place.is_outermost else None,
            in_specs=(lhs_spec, rhs_spec),
            out_specs=out_spec,
            axis_names=per_device_axes,
            check_vma=False,
        )(lhs, rhs)
        # The sum is left to XLA, which need not send all of it to all devices.
        return jax.lax.reduce_sum(out, (0,)) if split.sums else out

    return run


def _find_split(
    lhs: Sequence[int],
    params: dict[str, Any],
    keeps_examples: bool,
    sums_examples: bool,
    shards: int,
) -> _Split | None:
    """Split the examples; else the groups, which `jax.vmap` may have made of examples."""
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    features, batches = params["feature_group_count"], params["batch_group_count"]
    if keeps_examples and batches == 1 and lhs[lhs_spec[0]] % shards == 0:
        return _Split(lhs_spec[0], None, out_spec[0], params)
    if sums_examples and features == 1 and lhs[lhs_spec[1]] % shards == 0:
        return _Split(lhs_spec[1], rhs_spec[1], 0, params, sums=True)
    for kind, count, dim in (("feature", features, 1), ("batch", batches, 0)):
        if count > 1 and count % shards == 0:
            fewer = params | {f"{kind}_group_count": count // shards}
            return _Split(lhs_spec[dim], rhs_spec[0], out_spec[1], fewer)
    return None


def _split_at(dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes)


def _whole_after(free: int, spec: Sequence[int]) -> list[Any]:
    """A spec that leaves some first dims of a convolution to XLA; the others stay whole."""
    return [_ANY if dim in spec[:free] else None for dim in range(len(spec))]


_GUARDS = {
    "conv_general_dilated": _guard_convolution,
    **dict.fromkeys(_SCATTERS, _guard_scatter),
}


# Gradients of tables

_GRADIENT = "eqxshard_gradient"
#: Operations that a gradient of a table may go through after the scatter.
_MOVES = (
    "add_any",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "mul",
    "name",
    "neg",
    "pad",
    "reshape",
    "select_n",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
)


def mark_gradient(grad: Array) -> Array:
    """The gradient of a parameter; the next operation constrains it to its storage."""
    return checkpoint_name(grad, _GRADIENT)


def sum_tables_whole(jaxpr: Any) -> dict[int, Apply]:
    """The rule that sums gradients of lookups whole, before they are added or stored."""
    made_by = _made_by(jaxpr)
    #: The sharding to sum the gradient of each lookup in.
    whole: dict[Any, NamedSharding] = {}
    for eqn in jaxpr.eqns:
        mark = _maker(eqn.invars[0], made_by) if _is_constraint(eqn) else None
        if mark is not None and _is_mark(mark):
            lookups = _lookups(mark.invars[0], made_by)
            whole.update(dict.fromkeys(lookups, compute_sharding(eqn.params["sharding"])))

    def pick(eqn: Any) -> Apply:
        places = [whole.get(x) for x in eqn.invars]

        def apply(inputs: list[Any]) -> list[Any]:
            pairs = zip(inputs, places, strict=True)
            return bind(eqn, [_constrain(x, place) for x, place in pairs], eqn.params)

        return apply

    readers = ("add_any", "name")
    return {
        i: pick(eqn)
        for i, eqn in enumerate(jaxpr.eqns)
        if eqn.primitive.name in readers and not whole.keys().isdisjoint(eqn.invars)
    }


def _constrain(x: Any, sharding: NamedSharding | None) -> Any:
    if sharding is None:
        return x
    with jax.named_scope(REWRITTEN):
        return jax.lax.with_sharding_constraint(x, sharding)


def _made_by(jaxpr: Any) -> dict[Any, Any]:
    return {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}


def _maker(x: Any, made_by: dict[Any, Any]) -> Any:
    """The equation that makes an array, if there is one."""
    return None if isinstance(x, Literal) else made_by.get(x)


def _is_constraint(eqn: Any) -> bool:
    return eqn.primitive.name == "sharding_constraint"


def _is_mark(eqn: Any) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == _GRADIENT


def _lookups(x: Any, made_by: dict[Any, Any]) -> Iterator[Any]:
    """The terms of a gradient that are scattered; a table may also make the logits."""
    eqn = _maker(x, made_by)
    if eqn is not None and eqn.primitive.name == "add_any":
        for term in eqn.invars:
            yield from _lookups(term, made_by)
    elif _is_scattered(x, made_by):
        yield x


def _is_scattered(x: Any, made_by: dict[Any, Any]) -> bool:
    """True if a gradient is a scatter-add, or a sum with one."""
    pending, seen = [x], set()
    while pending:
        x = pending.pop()
        eqn = _maker(x, made_by)
        if eqn is None or x in seen:
            continue
        seen.add(x)
        if eqn.primitive.name == "scatter-add":
            return True
        if eqn.primitive.name in _MOVES:
            pending += eqn.invars
        for part in map(open_jaxpr, jaxprs_in(eqn.params)):
            # A call, a loop or a branch, whose results are those of the jaxpr inside.
            if len(part.outvars) == len(eqn.outvars):
                inside = part.outvars[eqn.outvars.index(x)]
                if _is_scattered(inside, _made_by(part)):
                    return True
    return False
