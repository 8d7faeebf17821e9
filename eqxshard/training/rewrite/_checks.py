"""The rules for checks by `equinox.error_if`, whose results a step returns.

Equinox raises from a callback in a branch of the program. With several devices that ends
in a deadlock (JAX 0.10 to 0.12): the device that runs the callback stops, and the others
wait for it in their next collective. Even where nothing is raised, the callback makes the
array that it guards whole on every device. So the branches are taken out of the jaxpr of
a step, which returns the number of the first check that failed; the host reads it, and
raises Equinox's error.

Some code cannot return a number, such as the condition of a loop, or code for each device.
A check in there stays where it is, but its callback does not raise: it tells the host to.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..._errors import UsageError
from ..._jax import dce_jaxpr, jaxpr_as_fun
from ...distributed import allgather_json
from ._jaxprs import Apply, Rule, equations, in_scope, map_jaxpr, open_jaxpr

#: The number of a failed check is its position, from 1, times this, plus the position of
#: its message.
_MOST_MESSAGES = 2**16


class Errors:
    """Equinox's functions that raise the errors of a step's checks.

    - `callbacks`: the function of each check that returns a number.
    - `noted`: the functions of other checks that failed in this process, each with the
        position of its message.
    - `has_others`: whether there are other checks.
    """

    def __init__(self):
        self.callbacks: list[Any] = []
        self.noted: list[tuple[Any, int]] = []
        self.has_others = False

    def failed(self, number: int) -> tuple[Any, int] | None:
        """The function of a check that failed, and the position of its message."""
        if number:
            check, message = divmod(number, _MOST_MESSAGES)
            return self.callbacks[check - 1], message
        noted, self.noted = self.noted, []
        return noted[0] if noted else None


class Checks(eqx.Module):
    """The result of the checks of a step.

    - `number`: the number of the first check that failed, or 0.
    - `errors`: the errors to raise.
    """

    number: Int[Array, ""]
    errors: Errors = eqx.field(static=True)

    def raise_failed(self) -> None:
        """Wait for the step, and raise the error of a check that failed."""
        failed = self.errors.failed(int(jax.device_get(self.number)))
        elsewhere: list[int] = []
        if self.errors.has_others:
            # One process alone may have noted that such a check failed.
            everyone = allgather_json(failed is not None)
            elsewhere = [
                process for process, has_failed in enumerate(everyone) if has_failed
            ]
        if failed is None:
            if elsewhere:
                raise UsageError(
                    f"a check by equinox.error_if failed in process {elsewhere[0]}; read "
                    "its output, which has the error."
                )
            return
        callback, message = failed

        # Equinox adds where in the model the check is, if it compiles the callback.
        @eqx.filter_jit
        def raises(message: Int[Array, ""]) -> Array:
            shape = jax.ShapeDtypeStruct((), jnp.int32)
            return jax.pure_callback(callback, shape, message)

        raises(jnp.int32(message))


def number_checks(errors: Errors) -> Rule:
    """The rule for checks in code that can return the number of one that failed.

    **Arguments:**

    - `errors`: collects the errors that the checks raise.
    """

    def apply(check: "_Check", inputs: list[Any]) -> Checked:
        errors.callbacks.append(check.callback)
        number = len(errors.callbacks) * _MOST_MESSAGES
        branch, *operands = inputs
        (position,) = check.message(*operands)
        failed = jnp.where(branch == 0, 0, number + jnp.asarray(position, jnp.int32))
        return Checked(check.held(*operands), failed)

    return lambda jaxpr: _for_checks(jaxpr, apply)


def note_checks(errors: Errors) -> Rule:
    """The rule for checks in all other code: they note that they failed, and go on."""

    def apply(check: "_Check", inputs: list[Any]) -> list[Any]:
        def note(position: Any, *results: Any) -> Any:
            errors.noted.append((check.callback, int(position)))
            return results

        errors.has_others = True
        branch, *operands = inputs
        results = tuple(check.held(*operands))
        shapes = jax.eval_shape(lambda: results)
        message = check.message(*operands)
        fails = lambda: jax.pure_callback(note, shapes, *message, *results)  # noqa: E731
        return [*jax.lax.cond(branch == 0, lambda: results, fails)]

    return lambda jaxpr: _for_checks(jaxpr, apply)


class _Check(NamedTuple):
    """A check, taken apart.

    - `held`, `message`: functions of its operands to its results, and to the position of
        its message.
    - `callback`: Equinox's function that raises.
    """

    held: Any
    message: Any
    callback: Any


def _for_checks(jaxpr: Any, apply: Callable[[_Check, list[Any]], Any]) -> dict[int, Apply]:
    found = {i: raising(eqn) for i, eqn in enumerate(jaxpr.eqns)}
    return {
        i: in_scope(ft.partial(apply, _take_apart(jaxpr.eqns[i], position)))
        for i, position in found.items()
        if position is not None
    }


def _take_apart(eqn: Any, position: int) -> _Check:
    held, failed = eqn.params["branches"]
    raises = open_jaxpr(failed).eqns[position]
    message = map_jaxpr(
        lambda jaxpr: jaxpr.replace(eqns=jaxpr.eqns[:position], outvars=raises.invars),
        failed,
    )
    callback = raises.params["callback"].callback_func
    return _Check(jaxpr_as_fun(held), jaxpr_as_fun(message), callback)


def without_unused(jaxpr: Any) -> Any:
    """A closed jaxpr without checks whose results are not used: Equinox makes none."""
    if not has_checks(jaxpr):
        return jaxpr
    return map_jaxpr(lambda part: dce_jaxpr(part, True, True)[0], jaxpr)


# Checks in jaxprs

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
    """True if something is checked in a jaxpr, or in one inside of it."""
    return any(map(raises, equations(jaxpr)))


def raises(eqn: Any) -> bool:
    """True if an equation calls Equinox's function that raises."""
    callback = getattr(eqn.params.get("callback"), "callback_func", None)
    return (
        eqn.primitive.name == "pure_callback"
        and getattr(callback, "__module__", None) == eqx.error_if.__module__
        and getattr(callback, "__qualname__", None) == _RAISES
    )


def raising(eqn: Any) -> int | None:
    """If an equation is a check, the position in its branch of the one that raises."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    inside = open_jaxpr(eqn.params["branches"][1]).eqns
    return next((i for i, each in enumerate(inside) if raises(each)), None)


def first_failed(*numbers: Int[Array, "..."]) -> Int[Array, ""]:
    """The first number that is not 0, if there is one."""
    all_numbers = jnp.concatenate([jnp.zeros(1, jnp.int32), *map(jnp.ravel, numbers)])
    return all_numbers[jnp.argmax(all_numbers != 0)]
