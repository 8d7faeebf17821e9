"""Equinox's checks (`equinox.error_if`) in jaxprs, and the number of one that failed."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from ._jaxprs import equations, open_jaxpr

#: Equinox's function that raises: it gets the position of a message.
_RAISES = "_error.<locals>.raises"


class Checked(NamedTuple):
    """The outputs of an equation in which something was checked.

    - `outputs`: the outputs.
    - `failed`: the number of the first check that failed, or 0.
    """

    outputs: list[Any]
    failed: Int[Array, ""]


def has_checks(jaxpr: Any) -> bool:
    """Whether something is checked in a jaxpr, or in one inside of it."""
    return any(map(raises, equations(jaxpr)))


def raises(eqn: Any) -> bool:
    """Whether an equation calls Equinox's function that raises."""
    callback = getattr(eqn.params.get("callback"), "callback_func", None)
    return (
        eqn.primitive.name == "pure_callback"
        and getattr(callback, "__module__", None) == eqx.error_if.__module__
        and getattr(callback, "__qualname__", None) == _RAISES
    )


def raising(eqn: Any) -> int | None:
    """If an equation is a check, the position of the one that raises, in its branch."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    inside = open_jaxpr(eqn.params["branches"][1]).eqns
    return next((i for i, each in enumerate(inside) if raises(each)), None)


def first_failed(*numbers: Int[Array, "..."]) -> Int[Array, ""]:
    """The first number that is not 0, if there is one."""
    all_numbers = jnp.concatenate([jnp.zeros(1, jnp.int32), *map(jnp.ravel, numbers)])
    return all_numbers[jnp.argmax(all_numbers != 0)]
