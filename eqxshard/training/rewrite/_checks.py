"""Checks by `equinox.error_if` in a compiled step, as a result of the step.

Equinox raises from a callback in a branch of the program. With several devices that ends
in a deadlock (JAX 0.10 to 0.12): the device that runs the callback stops, and the others
wait for it in their next collective. Even where nothing is raised, the callback makes the
array that it guards whole on every device. So the branches are taken out of the jaxpr of
a step, which returns the number of the first check that failed; the host reads it, and
raises Equinox's error.

A number is not returned from everywhere, such as from the condition of a loop or from code
for each device. A check in there stays where it is, but its callback does not raise: it
tells the host to.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Int

from ._jaxprs import (
    call_function,
    equations,
    jaxprs_in,
    map_jaxpr,
    map_jaxprs_in,
    open_jaxpr,
    scan_counts,
)

#: The number of a failed check is its position, from 1, times this, plus the position of
#: its message.
_MOST_MESSAGES = 2**16
#: Equinox's function that raises: it gets the position of a message.
_RAISES = "_error.<locals>.raises"


class Errors:
    """Equinox's functions that raise the errors of a step's checks.

    - `callbacks`: for each check that returns a number.
    - `noted`: for each of the others that failed, with the position of its message.
    """

    def __init__(self):
        self.callbacks: list[Any] = []
        self.noted: list[tuple[Any, int]] = []

    def failed(self, number: int) -> tuple[Any, int] | None:
        """The function of a check that failed, and the position of its message."""
        if number:
            check, message = divmod(number, _MOST_MESSAGES)
            return self.callbacks[check - 1], message
        noted, self.noted = self.noted, []
        return noted[0] if noted else None


class Checks(eqx.Module):
    """Whether the checks of a step held.

    - `number`: that of the first check that failed, or 0.
    - `errors`: what to raise.
    """

    number: Int[Array, ""]
    errors: Errors = eqx.field(static=True)

    def raise_failed(self) -> None:
        """Wait for the step, and raise the error of a check that failed."""
        failed = self.errors.failed(int(jax.device_get(self.number)))
        if failed is None:
            return
        callback, message = failed

        # Equinox adds where in the model the check is, if it compiles the callback.
        @eqx.filter_jit
        def raises(message: Int[Array, ""]) -> Array:
            shape = jax.ShapeDtypeStruct((), jnp.int32)
            return jax.pure_callback(callback, shape, message)

        raises(jnp.int32(message))


def collect_checks(jaxpr: Any, errors: Errors) -> Any:
    """Take the checks out of a closed jaxpr.

    **Arguments:**

    - `jaxpr`: the jaxpr.
    - `errors`: where to put what the checks raise.

    **Returns:**

    The jaxpr, with the number of the first check that failed as its last output. Without
    checks, the jaxpr as it was.
    """
    if not any(map(_raises, equations(jaxpr))):
        return jaxpr
    # Equinox makes no check whose result is not used.
    return map_jaxpr(
        lambda part: _add_number(dce_jaxpr(part, True, True)[0], errors), jaxpr
    )


def _has_checks(eqn: Any) -> bool:
    inside = (each for part in jaxprs_in(eqn.params) for each in equations(part))
    return _raises(eqn) or any(map(_raises, inside))


def _raises(eqn: Any) -> bool:
    callback = getattr(eqn.params.get("callback"), "callback_func", None)
    return (
        eqn.primitive.name == "pure_callback"
        and getattr(callback, "__module__", None) == eqx.error_if.__module__
        and getattr(callback, "__qualname__", None) == _RAISES
    )


def _raising(eqn: Any) -> int | None:
    """If an equation is a check, the position of the one that raises, in its branch."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    inside = open_jaxpr(eqn.params["branches"][1]).eqns
    return next((i for i, each in enumerate(inside) if _raises(each)), None)


def _add_number(jaxpr: Any, errors: Errors) -> Any:
    """A jaxpr with the number of the check that failed as one more output."""
    eqns, numbers = [], []
    for eqn in jaxpr.eqns:
        if _has_checks(eqn):
            new, number = _rewrite(eqn, errors)
            eqns.append(new)
            numbers.append(number)
        else:
            eqns.append(eqn)
    first = call_function(_first, [x for x in numbers if x is not None])
    return jaxpr.replace(eqns=[*eqns, first], outvars=[*jaxpr.outvars, *first.outvars])


def _rewrite(eqn: Any, errors: Errors) -> tuple[Any, Any]:
    """What takes the place of an equation with checks, and its number, if it has one."""
    name, params = eqn.primitive.name, eqn.params

    def inside(part: Any) -> Any:
        return map_jaxpr(lambda jaxpr: _add_number(jaxpr, errors), part)

    if _raising(eqn) is not None:
        return _check(eqn, errors)
    if name == "cond":
        return _with_output(eqn, branches=tuple(map(inside, params["branches"])))
    if name in ("jit", "remat2"):
        return _with_output(eqn, jaxpr=inside(params["jaxpr"]))
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return _call(core.jaxpr_as_fun(inside(params["call_jaxpr"])), eqn)
    if name == "scan":
        return _rewrite_scan(eqn, inside(params["jaxpr"]))
    if name == "while" and _is_plain_loop(params["cond_jaxpr"]):
        return _rewrite_while(eqn, inside(params["body_jaxpr"]))
    return _note(eqn, errors), None


def _check(eqn: Any, errors: Errors) -> tuple[Any, Any]:
    held, message, callback = _parts(eqn)
    errors.callbacks.append(callback)
    number = len(errors.callbacks) * _MOST_MESSAGES

    def check(branch: Int[Array, ""], *operands: Array) -> list[Array]:
        (position,) = message(*operands)
        failed = jnp.where(branch == 0, 0, number + jnp.asarray(position, jnp.int32))
        return [*held(*operands), failed]

    return _call(check, eqn)


def _note(eqn: Any, errors: Errors) -> Any:
    """An equation whose checks note that they failed, and go on."""
    if _raising(eqn) is None:

        def note_all(jaxpr: Any) -> Any:
            return jaxpr.replace(eqns=[_note(each, errors) for each in jaxpr.eqns])

        return eqn.replace(params=map_jaxprs_in(note_all, eqn.params))
    held, message, callback = _parts(eqn)

    def note(position: Any, *results: Any) -> Any:
        errors.noted.append((callback, int(position)))
        return results

    def check(branch: Int[Array, ""], *operands: Array) -> tuple[Array, ...]:
        results = tuple(held(*operands))
        shapes = jax.eval_shape(lambda: results)
        fails = lambda: jax.pure_callback(note, shapes, *message(*operands), *results)  # noqa: E731
        return jax.lax.cond(branch == 0, lambda: results, fails)

    return call_function(check, eqn.invars).replace(outvars=eqn.outvars)


def _parts(eqn: Any) -> tuple[Any, Any, Any]:
    """Of a check: functions of its operands to its results and to the position of its
    message, and Equinox's function that raises.
    """
    held, failed = eqn.params["branches"]
    position = _raising(eqn)
    raises = open_jaxpr(failed).eqns[position]
    message = map_jaxpr(
        lambda jaxpr: jaxpr.replace(eqns=jaxpr.eqns[:position], outvars=raises.invars),
        failed,
    )
    callback = raises.params["callback"].callback_func
    return core.jaxpr_as_fun(held), core.jaxpr_as_fun(message), callback


def _first(*numbers: Int[Array, "..."]) -> Int[Array, ""]:
    """The first number that is not 0, if there is one."""
    all_numbers = jnp.concatenate([jnp.zeros(1, jnp.int32), *map(jnp.ravel, numbers)])
    return all_numbers[jnp.argmax(all_numbers != 0)]


def _rewrite_scan(eqn: Any, body: Any) -> tuple[Any, Any]:
    params = eqn.params
    consts, carry = scan_counts(params)
    options = {name: params[name] for name in ("length", "reverse", "unroll")}

    def scan(*operands: Array) -> list[Array]:
        def step(state: Any, xs: Any) -> tuple[Any, Any]:
            out = core.jaxpr_as_fun(body)(*operands[:consts], *state, *xs)
            return out[:carry], out[carry:]

        first, xs = operands[consts : consts + carry], operands[consts + carry :]
        state, (*ys, numbers) = jax.lax.scan(step, [*first], [*xs], **options)
        return [*state, *ys, _first(numbers)]

    return _call(scan, eqn)


def _is_plain_loop(condition: Any) -> bool:
    """Whether a loop is as from `jax.lax.while_loop`, without checks in its condition."""
    # Under vmap, the condition has dims.
    is_scalar = not condition.out_avals[0].shape
    return is_scalar and not any(map(_raises, equations(condition)))


def _rewrite_while(eqn: Any, body: Any) -> tuple[Any, Any]:
    """A loop that stops once a check has failed: it might not end otherwise."""
    condition, params = eqn.params["cond_jaxpr"], eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]

    def loop(*operands: Array) -> list[Array]:
        def goes_on(carried: Any) -> Array:
            (holds,) = core.jaxpr_as_fun(condition)(*operands[:first], *carried[0])
            return holds & (carried[1] == 0)

        def step(carried: Any) -> Any:
            *state, failed = core.jaxpr_as_fun(body)(*operands[first:second], *carried[0])
            return state, failed

        carried = [*operands[second:]], jnp.int32(0)
        state, failed = jax.lax.while_loop(goes_on, step, carried)
        return [*state, failed]

    return _call(loop, eqn)


def _call(fn: Any, eqn: Any) -> tuple[Any, Any]:
    """A call, instead of an equation, of a function with a number as its last output."""
    call = call_function(fn, eqn.invars)
    number = call.outvars[-1]
    return call.replace(outvars=[*eqn.outvars, number]), number


def _with_output(eqn: Any, **params: Any) -> tuple[Any, Any]:
    """An equation with other parameters, and a number as one more output."""
    like = call_function(_first, [])
    (number,) = like.outvars
    if eqn.primitive.name == "jit":
        for name in ("out_shardings", "out_layouts"):
            params[name] = (*eqn.params[name], *like.params[name])
    outvars = [*eqn.outvars, number]
    return eqn.replace(params={**eqn.params, **params}, outvars=outvars), number
