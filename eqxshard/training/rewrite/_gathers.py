"""`drop_gathers`: no gather of an array that is only split again.

[`eqxshard.scan_layers`][] gathers one layer at a time. But layers that `jax.jit` or
`jax.checkpoint` passed on had been gathered before, and it splits them again. On GPUs, XLA
drops both.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding

from ...sharding._spec import axes_of
from ._jaxprs import jaxprs_in, map_jaxprs_in, open_jaxpr

#: Their inputs are those of the one jaxpr in their parameters.
_CALLS = ("jit", "closed_call", "remat2")


def drop_gathers(jaxpr: Any) -> Any:
    """Rewrite an open jaxpr."""
    gathers = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if _constrained(eqn) is not None}
    eqns = []
    for eqn in jaxpr.eqns:
        invars, params = [*eqn.invars], eqn.params
        for i, shardings in enumerate(_splits(eqn)):
            gather = None if isinstance(invars[i], core.Literal) else gathers.get(invars[i])
            if gather is not None and shardings and _are_finer(shardings, gather):
                invars[i] = gather.invars[0]
        if eqn.primitive.name in (*_CALLS, "scan", "cond"):
            params = map_jaxprs_in(drop_gathers, params)
        eqns.append(eqn.replace(invars=invars, params=params))
    return jaxpr.replace(eqns=eqns)


def _constrained(eqn: Any) -> NamedSharding | None:
    """The sharding that an equation constrains an array to, if it does."""
    if eqn.primitive.name != "sharding_constraint" or eqn.params["unconstrained_dims"]:
        return None
    sharding = eqn.params["sharding"]
    return sharding if isinstance(sharding, NamedSharding) else None


def _are_finer(shardings: Sequence[NamedSharding], gather: Any) -> bool:
    """Whether each splits every dim at least as far as a gather left it."""
    whole: Any = _constrained(gather)
    return all(
        each != whole
        and all(
            {*axes_of(left)} <= {*axes_of(split)}
            for left, split in itertools.zip_longest(whole.spec, each.spec)
        )
        for each in shardings
    )


def _splits(eqn: Any) -> list[list[NamedSharding] | None]:
    """The shardings that inputs are constrained to; `None` for one with another use."""
    sharding = _constrained(eqn)
    if sharding is not None:
        return [[sharding]]
    if eqn.primitive.name not in _CALLS:
        return []
    (inside,) = map(open_jaxpr, jaxprs_in(eqn.params))
    found: dict[Any, list[NamedSharding] | None] = {x: [] for x in inside.invars}
    for each in inside.eqns:
        splits = _splits(each)
        for i, x in enumerate(each.invars):
            if isinstance(x, core.Literal) or x not in found:
                continue
            known, more = found[x], splits[i] if splits else None
            found[x] = None if known is None or more is None else known + more
    for x in inside.outvars:
        if not isinstance(x, core.Literal) and x in found:
            found[x] = None
    return [found[x] for x in inside.invars]
