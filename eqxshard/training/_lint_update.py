"""Lint of an optimizer's update: stacked layers that it takes for one array."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from ..compiled._causes import plain_dims
from ..compiled._findings import Finding
from ..sharding._placement import named_leaves
from ..sharding._text import first_few
from ._optimizer import UPDATE
from ._per_layer import PER_LAYER, is_stacked
from ._state import TrainState, split_model
from .rewrite._jaxprs import jaxprs_in, open_jaxpr

_Shape = tuple[int, ...]
#: Operations on matrices, by JAX's names. Reductions have a parameter `axes`.
_OF_MATRICES = ("dot_general", "svd", "qr", "geqrf", "eigh", "cholesky")


def lint_update(state: TrainState, jaxpr: Any) -> Iterator[Finding]:
    """The findings of kind `per-layer`, in a step as it was traced."""
    made, trainable = state.made_with, True
    if made is not None and made.fits(state.model):
        trainable = made.trainable(state.model)
    params, _ = split_model(state.model, trainable)
    leaves = named_leaves(params)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves}
    stacks = {path for path, leaf in leaves if is_stacked(leaf) and leaf.shape[0] > 1}
    others = {_dims(shape) for path, shape in shapes.items() if path not in stacks}
    found = set[_Shape]()
    # What looks at all parameters looks at the only one, too.
    if len({*shapes.values()}) > 1:
        found = {*map(_dims, _looked_at(open_jaxpr(jaxpr), {}, ""))} - others
    paths = [path for path in shapes if path in stacks and _dims(shapes[path]) in found]
    if paths:
        yield Finding(
            "per-layer",
            paths[0],
            None,
            f"the optimizer takes the stacked layers of {first_few(paths)} for one array; "
            f"write eqxshard.per_layer(optim, {paths[0].partition('.')[0]!r}), and outside "
            "of it what looks at all parameters, as in "
            "optax.chain(optax.clip_by_global_norm(1), per_layer(...)).",
        )


def _dims(shape: _Shape) -> _Shape:
    """The dims of a matrix that may be transposed, or have dims of one."""
    return tuple(plain_dims(shape))


def _looked_at(jaxpr: Any, sums: dict[Any, set[_Shape]], scope: str) -> Iterator[_Shape]:
    """The shapes of arrays that an update reads as matrices, or scales by a norm of theirs.

    `sums` has the shapes of the arrays that a number was computed from. The norm of several
    arrays is for clipping by the global norm, or the like.
    """
    for eqn in jaxpr.eqns:
        here = f"{scope}/{eqn.source_info.name_stack}"
        parts = [*map(open_jaxpr, jaxprs_in(eqn.params))]
        for part in parts:
            # Before those of a part, an equation may have a condition, or those of another.
            given = zip(reversed(part.invars), reversed(eqn.invars))
            inside = {x: _read(sums, y) for x, y in given}
            yield from _looked_at(part, inside, here)
            for out, result in zip(eqn.outvars, part.outvars):
                sums[out] = _read(sums, out) | _read(inside, result)
        if parts or UPDATE not in here or PER_LAYER in here:
            continue
        looks = eqn.primitive.name in _OF_MATRICES or "axes" in eqn.params
        shapes = {x.aval.shape for x in eqn.invars if x.aval.size > 1} if looks else set()
        numbers = set[_Shape]().union(*(_read(sums, x) for x in eqn.invars))
        for out in eqn.outvars:
            if out.aval.size == 1:
                sums[out] = numbers | shapes
            else:
                yield from shapes
                yield from numbers if numbers == {out.aval.shape} else ()


def _read(sums: dict[Any, set[_Shape]], atom: Any) -> set[_Shape]:
    return set() if isinstance(atom, core.Literal) else sums.get(atom, set())
