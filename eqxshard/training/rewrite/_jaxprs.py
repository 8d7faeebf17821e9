"""Functions that walk through jaxprs and make equations; and the type of a `Rule`."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._jax import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Tracer,
    at_line_of,
    bind,
    context_of,
    jaxpr_as_fun,
    scope_of,
    varies_along,
)
from ...compiled._findings import REWRITTEN

#: A function from the inputs of an equation to its outputs.
Apply = Callable[[list[Any]], Any]
#: A function from an open jaxpr to functions for the equations that it picks, by position.
Rule = Callable[[Any], Mapping[int, Apply]]


def run_equations(
    eqns: Sequence[Any],
    read: Callable[[Any], Any],
    uses: Mapping[Any, int] | None = None,
    last: int = -1,
) -> dict[Any, Any]:
    """Compute equations as they are, at the user's lines.

    **Arguments:**

    - `eqns`: the equations, in order.
    - `read`: a function from a variable that none of them makes to its value.
    - `uses`, `last`: `last_uses` of the jaxpr that they are from, and the position there of
        the last one; by default, all that they make is returned.

    **Returns:**

    The values that are used later, by variable.
    """
    made = dict.fromkeys(x for eqn in eqns for x in eqn.outvars)
    given = dict.fromkeys(x for eqn in eqns for x in variables(eqn.invars) if x not in made)
    kept = [x for x in made if uses is None or uses.get(x, -1) > last]
    jaxpr = as_jaxpr(eqns, [*given], kept)
    return dict(zip(kept, jaxpr_as_fun(jaxpr)(*map(read, given)), strict=True))


def as_jaxpr(eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Equations as a closed jaxpr without constants, from variables to variables."""
    parts = {"invars": [*inputs], "outvars": [*outputs], "eqns": [*eqns]}
    return map_jaxpr(lambda empty: empty.replace(**parts), _empty())


def evaluate_equation(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of an equation, computed at the user's line."""
    given = {
        x: value
        for x, value in zip(eqn.invars, inputs, strict=True)
        if not isinstance(x, Literal)
    }
    return [*run_equations([eqn], given.__getitem__).values()]


def last_uses(jaxpr: Any) -> dict[Any, int]:
    """The position of the last equation that reads each variable of an open jaxpr."""
    uses = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in variables(eqn.invars)}
    return uses | dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))


def bind_at(eqn: Any, fn: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
    """Call a function of the inputs of an equation, in its context and at its line."""
    leaves, structure = jax.tree.flatten(inputs)

    @jax.jit
    def rewritten(*leaves: Any) -> Any:
        return fn(jax.tree.unflatten(structure, leaves))

    with context_of(eqn).manager:
        jaxpr, out = jax.make_jaxpr(rewritten, return_shape=True)(*leaves)
    given = dict(zip(open_jaxpr(jaxpr).invars, leaves, strict=True))
    given |= zip(open_jaxpr(jaxpr).constvars, consts_of(jaxpr), strict=True)
    eqns = [at_line_of(eqn, x) for x in open_jaxpr(jaxpr).eqns]
    made = run_equations(eqns, given.__getitem__)
    outputs = [
        x.val if isinstance(x, Literal) else made.get(x, given.get(x))
        for x in open_jaxpr(jaxpr).outvars
    ]
    return jax.tree.unflatten(jax.tree.structure(out), outputs)


def retrace(
    fn: Callable[[list[Any]], Any], inputs: list[Any], like: Any = None
) -> tuple[Any, list[Any], Any]:
    """A function as a jaxpr.

    **Arguments:**

    - `fn`, `inputs`: the function and its argument.
    - `like`: a jaxpr that is closed or open, as the result is to be; by default open.

    **Returns:**

    The jaxpr; its inputs, with constants if it is open; and the structure of its outputs.
    """
    leaves, structure = jax.tree.flatten(inputs)
    traced = lambda *leaves: fn(jax.tree.unflatten(structure, leaves))  # noqa: E731
    jaxpr, out = jax.make_jaxpr(traced, return_shape=True)(*leaves)
    out_structure = jax.tree.structure(out)
    if like is not None and hasattr(like, "consts"):
        return jaxpr, leaves, out_structure
    inside, consts = open_jaxpr(jaxpr), consts_of(jaxpr)
    if like is not None and consts:
        raise NotImplementedError("constants in an open jaxpr")
    if consts:
        inside = _without_constants(inside)
    return inside, [*consts, *leaves], out_structure


@functools.cache
def _empty() -> Any:
    return jax.make_jaxpr(lambda: ())()


_JAXPRS = (ClosedJaxpr, Jaxpr)
_MAY_HAVE_JAXPRS = (*_JAXPRS, dict, tuple, list)


def is_jaxpr(part: Any) -> bool:
    """True if a parameter of an equation is a jaxpr."""
    return isinstance(part, _JAXPRS)


def map_jaxpr(rewrite: Callable[[Any], Any], part: Any) -> Any:
    """Apply a function of open jaxprs to one that may be closed."""
    # In this order: JAX 0.11 has one type for both.
    if isinstance(part, Jaxpr):
        return rewrite(part)
    return part.replace(jaxpr=rewrite(part.jaxpr))


def open_jaxpr(part: Any) -> Any:
    """A jaxpr without its constants."""
    return part if isinstance(part, Jaxpr) else part.jaxpr


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among the inputs or results of an equation; the others are literals."""
    return [x for x in atoms if not isinstance(x, Literal)]


def jaxprs_in(part: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, in containers of any kind."""
    if isinstance(part, _JAXPRS):
        yield part
        return
    for each in part.values() if isinstance(part, dict) else part:
        # Most parameters are something else.
        if isinstance(each, _MAY_HAVE_JAXPRS):
            yield from jaxprs_in(each)


def all_jaxprs(jaxpr: Any, scope: str = "") -> Iterator[tuple[Any, str]]:
    """A jaxpr and those inside of it, each with the names of the transforms around it."""
    yield jaxpr, scope
    for eqn in open_jaxpr(jaxpr).eqns:
        for part in jaxprs_in(eqn.params):
            yield from all_jaxprs(part, f"{scope}/{scope_of(eqn)}")


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those inside of it."""
    return (eqn for part, _ in all_jaxprs(jaxpr) for eqn in open_jaxpr(part).eqns)


def map_jaxprs_in(rewrite: Callable[[Any], Any], part: Any) -> Any:
    """Apply a function to all of `jaxprs_in`.

    Containers keep their type; one without a jaxpr stays the same object.
    """
    if is_jaxpr(part):
        return rewrite(part)
    is_container = isinstance(part, dict | tuple | list)
    if not is_container or not any(jaxprs_in(part)):
        return part
    if isinstance(part, dict):
        return {key: map_jaxprs_in(rewrite, each) for key, each in part.items()}
    kind: Any = type(part)
    parts = [map_jaxprs_in(rewrite, each) for each in part]
    # The fields of a named tuple are arguments of their own.
    return kind(*parts) if hasattr(part, "_fields") else kind(parts)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of inputs of a `scan` that are constants, and that are carried."""
    if "ft_in" in eqn.params:  # JAX 0.11 and later.
        consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return consts, carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


def in_scope(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A function whose operations have a scope that says that they are not the user's."""

    def rewritten(inputs: list[Any]) -> Any:
        with jax.named_scope(REWRITTEN):
            return fn(inputs)

    return rewritten


def consts_of(part: Any) -> Sequence[Any]:
    """The constants of a jaxpr that may be closed."""
    return getattr(part, "consts", ())


def has_shardings(eqn: Any) -> bool:
    """True if a jitted function was given shardings."""
    given = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(each, jax.sharding.Sharding) for each in given)


def varying_like(x: Array, aval: Any) -> Array:
    """In code for each device, an array that varies along the axes that a type does."""
    axes = varies_along(aval) - varies_along(jax.typeof(x))
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def call_whole(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Call a closed jaxpr in one equation, without looking into it again."""
    inside, consts = open_jaxpr(jaxpr), consts_of(jaxpr)
    if any(isinstance(x, Tracer) for x in consts):
        # Tracers are values of the program around it, which an equation takes as inputs.
        whole = _without_constants(inside)
        # In this order: JAX 0.11 has one type for both.
        is_open = isinstance(jaxpr, Jaxpr)
        jaxpr = whole if is_open else jaxpr.replace(jaxpr=whole, consts=[])
        args = [*consts, *args]

    @jax.jit
    def like(*args: Any) -> Any:
        return [jnp.zeros(x.aval.shape, x.aval.dtype) for x in inside.outvars]

    (call,) = open_jaxpr(jax.make_jaxpr(like)(*args)).eqns
    return bind(call, args, call.params | {"jaxpr": jaxpr, "name": "rewritten"})


def _without_constants(jaxpr: Any) -> Any:
    """An open jaxpr whose first inputs are its constants."""
    invars = [*jaxpr.constvars, *jaxpr.invars]
    parts: dict[str, Any] = {"constvars": [], "invars": invars}
    if hasattr(jaxpr, "consts"):  # Since JAX 0.11, all jaxprs have them.
        parts["consts"] = []
    return jaxpr.replace(**parts)
