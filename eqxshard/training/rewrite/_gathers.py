"""`drop_gathers`: no gather of an array that is split again before it is used.

[`eqxshard.scan_layers`][] gathers one layer at a time. But where `jax.jit` or
`jax.checkpoint` passed on the layers, they had been gathered before, and it splits them
again. XLA drops both on GPUs, and neither on CPUs.
"""

from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding

from ...sharding._spec import axes_of
from ._jaxprs import jaxprs_in, map_jaxprs_in, open_jaxpr

#: Their inputs are those of the one jaxpr in their parameters.
_CALLS = ("jit", "closed_call", "remat2")


def drop_gathers(jaxpr: Any) -> Any:
    """Rewrite an open jaxpr."""
    gathers = {
        eqn.outvars[0]: eqn
        for eqn in jaxpr.eqns
        if isinstance(_constrained(eqn), NamedSharding)
    }

    def source(eqn: Any, number: int) -> Any:
        atom = eqn.invars[number]
        gather = None if isinstance(atom, core.Literal) else gathers.get(atom)
        if gather is None or not _splits_again(eqn, number, _constrained(gather)):
            return atom
        return gather.invars[0]

    eqns = []
    for eqn in jaxpr.eqns:
        invars = [source(eqn, number) for number in range(len(eqn.invars))]
        params = eqn.params
        if eqn.primitive.name in (*_CALLS, "scan", "cond"):
            params = map_jaxprs_in(drop_gathers, params)
        eqns.append(eqn.replace(invars=invars, params=params))
    return jaxpr.replace(eqns=eqns)


def _constrained(eqn: Any) -> Any:
    """The sharding that an equation constrains an array to, if it does."""
    if eqn.primitive.name != "sharding_constraint" or eqn.params["unconstrained_dims"]:
        return None
    return eqn.params["sharding"]


def _splits_again(eqn: Any, number: int, whole: NamedSharding) -> bool:
    """Whether an input is only split, further than a sharding says."""
    sharding = _constrained(eqn)
    if isinstance(sharding, NamedSharding):
        ours = [*map(axes_of, whole.spec)]
        theirs = [*map(axes_of, sharding.spec), *[()] * len(ours)]
        return sharding != whole and all({*a} <= {*b} for a, b in zip(ours, theirs))
    if eqn.primitive.name not in _CALLS:
        return False
    (inside,) = map(open_jaxpr, jaxprs_in(eqn.params))
    variable = inside.invars[number]
    uses = [
        (each, i)
        for each in inside.eqns
        for i, x in enumerate(each.invars)
        if x is variable
    ]
    is_returned = any(x is variable for x in inside.outvars)
    return (
        bool(uses) and not is_returned and all(_splits_again(*use, whole) for use in uses)
    )
