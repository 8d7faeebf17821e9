"""Walking through jaxprs, and making equations of functions."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from ...compiled._findings import REWRITTEN


def evaluate_equation(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation. Its line stays the user's."""
    given = {
        atom: x
        for atom, x in zip(eqn.invars, inputs, strict=True)
        if not isinstance(atom, core.Literal)
    }
    parts = {"invars": [*given], "outvars": eqn.outvars, "eqns": [eqn]}
    jaxpr = map_jaxpr(lambda empty: empty.replace(**parts), _empty())
    return core.jaxpr_as_fun(jaxpr)(*given.values())


@functools.cache
def _empty() -> Any:
    return jax.make_jaxpr(lambda: ())()


def is_jaxpr(part: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr."""
    return isinstance(part, core.ClosedJaxpr | core.Jaxpr)


def map_jaxpr(rewrite: Callable[[Any], Any], part: Any) -> Any:
    """Apply a function of open jaxprs to one that may be closed."""
    # In this order: JAX 0.11 has one type for both.
    if isinstance(part, core.Jaxpr):
        return rewrite(part)
    return part.replace(jaxpr=rewrite(part.jaxpr))


def open_jaxpr(part: Any) -> Any:
    """A jaxpr without its constants."""
    return part if isinstance(part, core.Jaxpr) else part.jaxpr


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among the inputs or results of an equation; the others are literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def jaxprs_in(part: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, in containers of any kind."""
    if is_jaxpr(part):
        yield part
    elif isinstance(part, dict):
        yield from jaxprs_in([*part.values()])
    elif isinstance(part, tuple | list):
        for each in part:
            yield from jaxprs_in(each)


def all_jaxprs(jaxpr: Any, scope: str = "") -> Iterator[tuple[Any, str]]:
    """A jaxpr and those inside of it, each with the names of the transforms around it."""
    yield jaxpr, scope
    for eqn in open_jaxpr(jaxpr).eqns:
        for part in jaxprs_in(eqn.params):
            yield from all_jaxprs(part, f"{scope}/{eqn.source_info.name_stack}")


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those inside of it."""
    return (eqn for part, _ in all_jaxprs(jaxpr) for eqn in open_jaxpr(part).eqns)


def map_jaxprs_in(rewrite: Callable[[Any], Any], part: Any) -> Any:
    """Apply a function of open jaxprs to all of `jaxprs_in`.

    Containers keep their type; one without a jaxpr stays the same object.
    """
    if is_jaxpr(part):
        return map_jaxpr(rewrite, part)
    if not any(True for _ in jaxprs_in(part)):
        return part
    if isinstance(part, dict):
        return {key: map_jaxprs_in(rewrite, each) for key, each in part.items()}
    parts = [map_jaxprs_in(rewrite, each) for each in part]
    # The fields of a named tuple are arguments of their own.
    return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a `scan` are constants, and how many are carried."""
    if "ft_in" in eqn.params:  # JAX 0.11 and later.
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return consts, carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


def call_function(fn: Callable[..., Any], variables: Sequence[Any]) -> Any:
    """An equation that calls a function of ours on variables, in a scope that says so."""

    @jax.jit
    def rewritten(*args: Any) -> Any:
        with jax.named_scope(REWRITTEN):
            return fn(*args)

    avals = [variable.aval for variable in variables]
    (call,) = jax.make_jaxpr(rewritten)(*avals).eqns
    return call.replace(invars=[*variables])


def call_equation(
    fn: Callable[..., Any], eqn: Any, variables: Sequence[Any] | None = None
) -> Any:
    """An equation that calls a function instead, on the same inputs or on others.

    If the function returns arrays of other types, the equation stays as it is.
    """
    call = call_function(fn, eqn.invars if variables is None else variables)
    if [x.aval for x in call.outvars] != [x.aval for x in eqn.outvars]:
        return eqn
    return call.replace(outvars=eqn.outvars, source_info=eqn.source_info, ctx=eqn.ctx)
