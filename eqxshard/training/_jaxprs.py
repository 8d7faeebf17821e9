"""Rewriting jaxprs: the same function, written so that XLA compiles it better."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core


def rewrite_function(fn: Callable[..., Any], rewrite: Callable[[Any], Any]) -> Any:
    """A function of PyTrees of arrays, with its jaxpr rewritten.

    **Arguments:**

    - `fn`: the function.
    - `rewrite`: from an open jaxpr to another that computes the same.
    """

    @ft.wraps(fn)
    def rewritten(*args: Any) -> Any:
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        flat = core.jaxpr_as_fun(map_jaxpr(rewrite, jaxpr))(*jax.tree.leaves(args))
        leaves, structure = jax.tree.flatten(out)
        # A constant, such as a flag that `BatchNorm` sets, comes back as a NumPy scalar.
        flat = [
            x if isinstance(x, jax.Array) else jnp.asarray(x, like.dtype)
            for x, like in zip(flat, leaves)
        ]
        return jax.tree.unflatten(structure, flat)

    return rewritten


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


def call_function(fn: Callable[..., Any], variables: Sequence[Any]) -> Any:
    """An equation that calls a function on variables."""
    avals = [variable.aval for variable in variables]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    (call,) = jax.make_jaxpr(jax.jit(fn))(*shapes).eqns
    return call.replace(invars=[*variables])


def call_equation(fn: Callable[..., Any], eqn: Any) -> Any:
    """An equation that calls a function instead, on the same inputs."""
    return call_function(fn, eqn.invars).replace(outvars=eqn.outvars)
