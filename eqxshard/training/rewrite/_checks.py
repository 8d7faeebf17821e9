"""Checks by `equinox.error_if` in a compiled step, as a result of the step.

Equinox raises from a callback in a branch of the program. With several devices that ends
in a deadlock (JAX 0.10 to 0.12): the device that runs the callback stops, and the others
wait for it in their next collective. Even where nothing is raised, the callback makes the
array that it guards whole on every device. So the branches are taken out of the jaxpr of
a step, which returns the number of the first check that failed; the host reads it, and
raises Equinox's error.

A check where no number can be returned from, such as in the condition of a loop, stays
where it is. With several devices its callback does not raise, but tells the host to.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from ._jaxprs import (
    call_equation,
    call_function,
    jaxprs_in,
    map_jaxpr,
    map_jaxprs_in,
    open_jaxpr,
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


def collect_checks(jaxpr: Any, errors: Errors, several: bool) -> Any:
    """Take the checks out of a closed jaxpr.

    **Arguments:**

    - `jaxpr`: the jaxpr.
    - `errors`: where to put what the checks raise.
    - `several`: whether it runs on several devices.

    **Returns:**

    The jaxpr, with the number of the first check that failed as its last output. Without
    checks, the jaxpr as it was.
    """
    if not any(map(_has_checks, open_jaxpr(jaxpr).eqns)):
        return jaxpr

    def collect(jaxpr: Any) -> Any:
        # Equinox makes no check whose result is not used.
        jaxpr, _ = dce_jaxpr(jaxpr, True, True)
        return _Collector(errors, several).add_number(jaxpr)

    return map_jaxpr(collect, jaxpr)


def _has_checks(eqn: Any) -> bool:
    inside = (each for part in jaxprs_in(eqn.params) for each in open_jaxpr(part).eqns)
    return _raises(eqn) or any(map(_has_checks, inside))


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


@dataclass(frozen=True)
class _Collector:
    """Takes checks out of jaxprs, and puts what they raise into `errors`.

    - `per_device`: whether this is code for each device, and not for all.
    """

    errors: Errors
    several: bool
    per_device: bool = False

    def add_number(self, jaxpr: Any) -> Any:
        """A jaxpr with the number of the check that failed as one more output."""
        eqns, numbers = [], []
        for eqn in jaxpr.eqns:
            if _has_checks(eqn):
                *new, number = self._rewrite(eqn)
                eqns.extend(new)
                numbers.append(number)
            else:
                eqns.append(eqn)
        first = call_function(_first, [x for x in numbers if x is not None])
        return jaxpr.replace(eqns=[*eqns, first], outvars=[*jaxpr.outvars, *first.outvars])

    def _rewrite(self, eqn: Any) -> list[Any]:
        """The equations to put in the place of one with checks, and their number."""
        name, params = eqn.primitive.name, eqn.params

        def inside(part: Any) -> Any:
            return map_jaxpr(self.add_number, part)

        if _raising(eqn) is not None:
            return self._check(eqn)
        if name == "cond":
            return _with_output(eqn, branches=tuple(map(inside, params["branches"])))
        if name in ("jit", "remat2"):
            return _with_output(eqn, jaxpr=inside(params["jaxpr"]))
        if name in ("custom_jvp_call", "custom_vjp_call"):
            return _call(core.jaxpr_as_fun(inside(params["call_jaxpr"])), eqn)
        if name == "scan":
            return _rewrite_scan(eqn, inside(params["jaxpr"]))
        if name == "shard_map":
            local = replace(self, per_device=True)
            return _rewrite_per_device(eqn, map_jaxpr(local.add_number, params["jaxpr"]))
        if name == "while" and not any(map(_has_checks, params["cond_jaxpr"].eqns)):
            return _rewrite_loop(eqn, inside(params["body_jaxpr"]), not self.per_device)
        return [self._note(eqn) if self.several else eqn, None]

    def _check(self, eqn: Any) -> list[Any]:
        held, message, callback = _parts(eqn)
        self.errors.callbacks.append(callback)
        number = len(self.errors.callbacks) * _MOST_MESSAGES

        def check(branch: Int[Array, ""], *operands: Array) -> list[Array]:
            (position,) = message(*operands)
            failed = jnp.where(branch == 0, 0, number + jnp.asarray(position, jnp.int32))
            return [*held(*operands), failed]

        return _call(check, eqn)

    def _note(self, eqn: Any) -> Any:
        """An equation whose checks note that they failed, and go on."""
        if _raising(eqn) is None:
            return eqn.replace(params=map_jaxprs_in(self._note_all, eqn.params))
        held, message, callback = _parts(eqn)

        def note(position: Any, *results: Any) -> Any:
            self.errors.noted.append((callback, int(position)))
            return results

        def check(branch: Int[Array, ""], *operands: Array) -> tuple[Array, ...]:
            results = tuple(held(*operands))
            shapes = jax.eval_shape(lambda: results)
            fails = lambda: jax.pure_callback(note, shapes, *message(*operands), *results)  # noqa: E731
            return jax.lax.cond(branch == 0, lambda: results, fails)

        return call_equation(check, eqn)

    def _note_all(self, jaxpr: Any) -> Any:
        return jaxpr.replace(eqns=[*map(self._note, jaxpr.eqns)])


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


def _rewrite_scan(eqn: Any, body: Any) -> list[Any]:
    params = eqn.params
    if "ft_in" in params:  # JAX 0.11 and later.
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}

    def scan(*operands: Array) -> list[Array]:
        def step(state: Any, xs: Any) -> tuple[Any, Any]:
            out = core.jaxpr_as_fun(body)(*operands[:consts], *state, *xs)
            return out[:carry], out[carry:]

        first, xs = operands[consts : consts + carry], operands[consts + carry :]
        state, (*ys, numbers) = jax.lax.scan(step, [*first], [*xs], **options)
        return [*state, *ys, _first(numbers)]

    return _call(scan, eqn)


def _rewrite_loop(eqn: Any, body: Any, stops: bool) -> list[Any]:
    """A loop of `jax.lax.while_loop` that carries the number along.

    It may `stop` once a check has failed, as Equinox would: it might not end otherwise.
    """
    # Under vmap, the condition may have dims, which all that is carried needs.
    shape = open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0].aval.shape

    def carry_number(jaxpr: Any) -> Any:
        *outvars, number = jaxpr.outvars
        carried = _variable(shape)
        kept = call_function(lambda a, b: jnp.where(a == 0, b, a), [carried, number])
        return jaxpr.replace(
            invars=[*jaxpr.invars, carried],
            eqns=[*jaxpr.eqns, kept],
            outvars=[*outvars, *kept.outvars],
        )

    def read_number(jaxpr: Any) -> Any:
        (goes_on,), carried = jaxpr.outvars, _variable(shape)
        holds = call_function(lambda a, b: a & (b == 0), [goes_on, carried])
        jaxpr = jaxpr.replace(invars=[*jaxpr.invars, carried])
        if not stops:
            return jaxpr
        return jaxpr.replace(eqns=[*jaxpr.eqns, holds], outvars=holds.outvars)

    zero = call_function(lambda: jnp.zeros(shape, jnp.int32), [])
    loop, numbers = _with_output(
        eqn.replace(invars=[*eqn.invars, *zero.outvars]),
        shape,
        body_jaxpr=map_jaxpr(carry_number, body),
        cond_jaxpr=map_jaxpr(read_number, eqn.params["cond_jaxpr"]),
    )
    first = call_function(_first, [numbers])
    return [zero, loop, first, *first.outvars]


def _rewrite_per_device(eqn: Any, jaxpr: Any) -> list[Any]:
    """Code for each device, which returns a number for each."""
    # JAX 0.10.1 calls them `manual_axes`.
    names = ("newly_manual_axes", "manual_axes")
    manual = next(eqn.params[name] for name in names if name in eqn.params)
    mesh = eqn.params["mesh"]
    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    count = math.prod(mesh.shape[axis] for axis in axes)
    *outvars, number = jaxpr.outvars
    row = call_function(lambda number: number[None], [number])
    jaxpr = jaxpr.replace(eqns=[*jaxpr.eqns, row], outvars=[*outvars, *row.outvars])
    out_specs = (*eqn.params["out_specs"], PartitionSpec(axes))
    per_device, numbers = _with_output(eqn, (count,), jaxpr=jaxpr, out_specs=out_specs)
    first = call_function(_first, [numbers])
    return [per_device, first, *first.outvars]


def _call(fn: Any, eqn: Any) -> list[Any]:
    """A call, instead of an equation, of a function with a number as its last output."""
    call = call_function(fn, eqn.invars)
    number = call.outvars[-1]
    return [call.replace(outvars=[*eqn.outvars, number]), number]


def _with_output(eqn: Any, shape: Sequence[int] = (), **params: Any) -> list[Any]:
    """An equation with other parameters, and one more output."""
    if eqn.primitive.name == "jit":
        default = call_function(_first, []).params
        for name in ("out_shardings", "out_layouts"):
            params[name] = (*eqn.params[name], *default[name])
    output = _variable(shape)
    outvars = [*eqn.outvars, output]
    return [eqn.replace(params={**eqn.params, **params}, outvars=outvars), output]


def _variable(shape: Sequence[int]) -> Any:
    """A new variable of integers."""
    like = jax.ShapeDtypeStruct(shape, jnp.int32)
    return open_jaxpr(jax.make_jaxpr(lambda x: x)(like)).invars[0]
