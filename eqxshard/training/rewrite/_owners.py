"""`map_layers`: optimizers of stacked layers, with each matrix whole on one device.

Muon and its kind multiply each matrix with itself, again and again. Of a matrix that is
split, XLA would gather it, or sum parts of the product, on every device. So before the
first product the stack is split by layers instead: an all-to-all brings each device the
whole matrices of its layers. After the last one, another brings the result back (Liu et
al., https://arxiv.org/abs/2502.16982).
"""

import collections
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._jax import Literal
from ...sharding._explicit import constrain_to
from ...sharding._leaves import leaf_path, stacked_depth
from ...sharding._spec import axes_of, spec_axes
from ._jaxprs import (
    consts_of,
    equations,
    jaxprs_in,
    open_jaxpr,
    run_equations,
    variables,
)
from ._rewrite import is_rewriting, run_rewritten

_FACTORIZATIONS = (
    "cholesky",
    "eigh",
    "householder_product",
    "lu",
    "qr",
    "schur",
    "svd",
    "triangular_solve",
)


def map_layers(
    update: Callable[..., Any],
    args: Sequence[PyTree],
    shardings: PyTree[NamedSharding | None],
) -> Any:
    """`jax.vmap` of an optimizer's update of one layer.

    **Arguments:**

    - `update`: of gradients, a state and parameters.
    - `args`: these, stacked.
    - `shardings`: those of all gradients of the model, by path; `None` if not known.
    """
    update_layers = jax.vmap(update)
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    known = {leaf_path(path): sharding for path, sharding in leaves}
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    stored = [known.get(leaf_path(path[1:])) for path, _ in leaves]
    depth = stacked_depth(args[0])
    owners = _find_owners([x for x in stored if x is not None], depth)
    if owners is None or not is_rewriting():
        return update_layers(*args)

    def rewrite(jaxpr: Any) -> Any:
        fn = lambda *leaves: _own(jaxpr, leaves, depth, stored, owners)  # noqa: E731
        return jax.make_jaxpr(fn)(*[x.aval for x in open_jaxpr(jaxpr).invars])

    jaxpr, out = jax.make_jaxpr(update_layers, return_shape=True)(*args)
    return run_rewritten(rewrite, jaxpr, out, args)[0]


def _find_owners(shardings: Sequence[NamedSharding], depth: int) -> NamedSharding | None:
    """How to split a stack by layers: over the axes that split its arrays.

    Those for which the number of layers does not divide are left out; `None` if all are.
    """
    split = {axis for each in shardings for axis in spec_axes(each.spec)}
    sizes = shardings[0].mesh.shape if shardings else {}
    axes = list[str]()
    for axis in [axis for axis, size in sizes.items() if axis in split and size > 1]:
        divides = depth % math.prod(sizes[each] for each in (*axes, axis)) == 0
        axes += [axis] if divides else []
    # Matrices of experts are a stack already.
    if not axes or "expert" in split:
        return None
    return NamedSharding(shardings[0].mesh, PartitionSpec(tuple(axes)))


def _own(
    jaxpr: Any,
    args: Sequence[Any],
    depth: int,
    shardings: Sequence[NamedSharding | None],
    owners: NamedSharding,
) -> list[Any]:
    """The outputs of a jaxpr of so many layers, whose inputs have these shardings."""
    inside = open_jaxpr(jaxpr)
    values = dict(zip(inside.invars, args, strict=True))
    values |= zip(inside.constvars, consts_of(jaxpr), strict=True)
    #: Arrays that are split as parameters are stored, and how. And for each array, its
    #: copy that is split by layers.
    stored, whole = dict(zip(inside.invars, shardings, strict=True)), dict[Any, Any]()

    def steps(x: Any) -> list[NamedSharding]:
        """One axis after the other: XLA would gather what moves along several at once."""
        rest = [PartitionSpec.UNCONSTRAINED] * (len(x.aval.shape) - 1)
        axes = axes_of(owners.spec[0])
        specs = [PartitionSpec(axes[:n], *rest) for n in range(1, len(axes))]
        return [*(NamedSharding(owners.mesh, spec) for spec in specs), owners]

    for eqn in inside.eqns:
        inputs = [x for x in variables(eqn.invars) if x in stored or x in whole]
        shapes = {x: x.aval.shape for x in inputs}
        matrices = [x for x in inputs if len(shapes[x]) > 2 and shapes[x][0] == depth]
        used = whole
        is_whole = False
        if _needs_matrices(eqn):
            for x in [x for x in matrices if x not in whole]:
                whole[x] = ft.reduce(constrain_to, steps(x), values[x])
        if all(x in whole for x in matrices):
            is_whole = bool(matrices)
        else:
            places = {shapes[x]: stored[x] for x in matrices if x not in whole}
            used = {}
            for x in matrices:
                place = places.get(shapes[x])
                if x not in stored and place is not None:
                    # Pinned first, or the last product would be computed elsewhere, too.
                    moves = [*reversed(steps(x)), place]
                    used[x] = ft.reduce(constrain_to, moves, values[x])
            is_moved = eqn.primitive.name == "transpose"
            for x in eqn.outvars:
                stored[x] = None if is_moved else places.get(x.aval.shape)
        values |= run_equations([eqn], collections.ChainMap(used, values).__getitem__)
        if is_whole:
            whole.update((x, values[x]) for x in eqn.outvars if x in values)
    return [x.val if isinstance(x, Literal) else values[x] for x in inside.outvars]


def _needs_matrices(eqn: Any) -> bool:
    """Whether an equation, or one inside of it, multiplies or factorizes matrices."""
    inside = (each for part in jaxprs_in(eqn.params) for each in equations(part))
    return any(map(_is_matrix_work, (eqn, *inside)))


def _is_matrix_work(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in _FACTORIZATIONS
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return all(len(contracted) + len(batch) < x.aval.ndim for x in eqn.invars)
