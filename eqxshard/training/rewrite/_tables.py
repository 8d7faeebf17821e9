"""The rule `sum_tables_whole`: gradients of tables, summed over the batch, then split.

The gradient of `table[tokens]` is a scatter-add of one row per token. If it is constrained
to where a table is stored that is split over an axis of the batch, XLA may move activation
gradients: every device gathers those of the whole batch (JAX 0.10 to 0.12, on CPUs and
GPUs). Constrained to whole first, each device scatters the rows of its own tokens, and
tables are summed. That is one sum of the whole table where XLA makes no reduce-scatter of
it, so all other gradients are left alone.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import Array

from ..._jax import Literal, bind
from ...compiled._findings import REWRITTEN
from ...sharding._placement import compute_sharding
from ._interpreter import Apply
from ._jaxprs import jaxprs_in, open_jaxpr

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
    """The rule for sums with gradients of lookups, and for gradients that are one."""
    made_by = _made_by(jaxpr)
    #: By gradient of a lookup, the sharding to sum it in.
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
    """Whether a gradient is a scatter-add, or a sum with one."""
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
