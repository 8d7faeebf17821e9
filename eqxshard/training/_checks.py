"""Checks by `equinox.error_if` in a compiled step, as a result of the step.

Equinox raises from a callback in a branch of the program. With several devices that ends
in a deadlock (JAX 0.10 to 0.12): the device that runs the callback stops, and the others
wait for it in their next collective. Even where nothing is raised, the callback makes the
array that it guards whole on every device. So the branches are taken out of the jaxpr of
a step, which returns the number of the first check that failed; the host reads it, and
raises Equinox's error.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from ._jaxprs import call_function, map_jaxpr, open_jaxpr

#: The number of a failed check is its position, from 1, times this, plus the position of
#: its message.
_MOST_MESSAGES = 2**16


class Checks(eqx.Module):
    """Whether the checks of a step held.

    - `failed`: the number of the first check that failed, or 0.
    - `callbacks`: for each check, Equinox's function from the position of a message to
        an error, which it raises.
    """

    failed: Int[Array, ""]
    callbacks: tuple[Any, ...] = eqx.field(static=True)

    def raise_failed(self) -> None:
        """Wait for the step, and raise the error of a check that failed."""
        failed = int(jax.device_get(self.failed))
        if not failed:
            return
        check, message = divmod(failed, _MOST_MESSAGES)
        callback = self.callbacks[check - 1]

        # Equinox adds where in the model the check is, if it compiles the callback.
        @eqx.filter_jit
        def raises(message: Int[Array, ""]) -> Array:
            shape = jax.ShapeDtypeStruct((), jnp.int32)
            return jax.pure_callback(callback, shape, message)

        raises(jnp.int32(message))
        raise eqx.EquinoxRuntimeError(_text(callback, message))


def collect_checks(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """Take the checks out of a closed jaxpr.

    **Returns:**

    The jaxpr, with the number of the first check that failed as its last output, and the
    callbacks of all checks. Without checks, the jaxpr as it was.

    **Raises:**

    `ValueError` if a check is where it cannot be taken out.
    """
    if not any(map(_has_checks, open_jaxpr(jaxpr).eqns)):
        return jaxpr, ()
    callbacks: list[Any] = []

    def collect(jaxpr: Any) -> Any:
        # Equinox makes no check whose result is not used.
        jaxpr, _ = dce_jaxpr(jaxpr, True, True)
        return _with_number(jaxpr, callbacks)

    return map_jaxpr(collect, jaxpr), tuple(callbacks)


def _has_checks(eqn: Any) -> bool:
    return any(True for _ in _callbacks(eqn))


def _callbacks(eqn: Any) -> Iterator[Any]:
    """The callbacks of the checks in an equation."""
    position = _raising(eqn)
    if position is not None:
        yield _callback(open_jaxpr(eqn.params["branches"][1]).eqns[position])
        return
    for jaxpr in core.jaxprs_in_params(eqn.params):
        for inside in jaxpr.eqns:
            yield from _callbacks(inside)


def _raising(eqn: Any) -> int | None:
    """If an equation is a check, the position of the one that raises, in its branch."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    for position, inside in enumerate(open_jaxpr(eqn.params["branches"][1]).eqns):
        is_callback = inside.primitive.name == "pure_callback"
        if is_callback and _callback(inside).__module__ == eqx.error_if.__module__:
            return position
    return None


def _callback(eqn: Any) -> Any:
    return eqn.params["callback"].callback_func


def _text(callback: Any, message: int) -> str:
    """The message that a user gave to a check."""
    try:
        callback(np.int32(message))
    except RuntimeError as error:
        # Equinox adds advice.
        return str(error).partition("\n\n\n---")[0]
    return ""


def _with_number(jaxpr: Any, callbacks: list[Any]) -> Any:
    """A jaxpr without its checks, with the number of the one that failed as an output."""
    eqns, numbers = [], []
    for eqn in jaxpr.eqns:
        if _has_checks(eqn):
            *new, number = _rewrite(eqn, callbacks)
            eqns.extend(new)
            numbers.append(number)
        else:
            eqns.append(eqn)
    first = call_function(_first, numbers)
    return jaxpr.replace(eqns=[*eqns, first], outvars=[*jaxpr.outvars, *first.outvars])


def _first(*numbers: Int[Array, "..."]) -> Int[Array, ""]:
    """The first number that is not 0, if there is one."""
    all_numbers = jnp.concatenate([jnp.zeros(1, jnp.int32), *map(jnp.ravel, numbers)])
    return all_numbers[jnp.argmax(all_numbers != 0)]


def _rewrite(eqn: Any, callbacks: list[Any]) -> list[Any]:
    """The equations to put in the place of one with checks, and their number."""
    name, params = eqn.primitive.name, eqn.params

    def inside(part: Any) -> Any:
        return map_jaxpr(lambda jaxpr: _with_number(jaxpr, callbacks), part)

    if _raising(eqn) is not None:
        return _rewrite_check(eqn, callbacks)
    if name == "cond":
        return _with_output(eqn, branches=tuple(map(inside, params["branches"])))
    if name in ("jit", "remat2"):
        return _with_output(eqn, jaxpr=inside(params["jaxpr"]))
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return _call(core.jaxpr_as_fun(inside(params["call_jaxpr"])), eqn)
    if name == "scan":
        return _rewrite_scan(eqn, inside(params["jaxpr"]))
    if name == "shard_map":
        return _rewrite_per_device(eqn, inside(params["jaxpr"]))
    if name == "while" and not any(map(_has_checks, params["cond_jaxpr"].eqns)):
        return _rewrite_loop(eqn, inside(params["body_jaxpr"]))
    message = _text(next(_callbacks(eqn)), 0)
    raise ValueError(
        f"equinox.error_if(..., {message!r}) is called inside of a {name}, from where a "
        "step cannot report it; move it out of there, or set EQX_ON_ERROR=nan in the "
        "environment, for a step that is not finite instead."
    )


def _rewrite_check(eqn: Any, callbacks: list[Any]) -> list[Any]:
    held, failed = eqn.params["branches"]
    position = _raising(eqn)
    raises = open_jaxpr(failed).eqns[position]
    callbacks.append(_callback(raises))
    number = len(callbacks) * _MOST_MESSAGES
    message = map_jaxpr(
        lambda jaxpr: jaxpr.replace(eqns=jaxpr.eqns[:position], outvars=raises.invars),
        failed,
    )

    def check(branch: Int[Array, ""], *operands: Array) -> list[Array]:
        (position,) = core.jaxpr_as_fun(message)(*operands)
        failed = jnp.where(branch == 0, 0, number + jnp.asarray(position, jnp.int32))
        return [*core.jaxpr_as_fun(held)(*operands), failed]

    return _call(check, eqn)


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


def _rewrite_loop(eqn: Any, body: Any) -> list[Any]:
    """A loop of `jax.lax.while_loop` that carries the number along."""
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

    def ignore_number(jaxpr: Any) -> Any:
        return jaxpr.replace(invars=[*jaxpr.invars, _variable(shape)])

    zero = call_function(lambda: jnp.zeros(shape, jnp.int32), [])
    loop, numbers = _with_output(
        eqn.replace(invars=[*eqn.invars, *zero.outvars]),
        shape,
        body_jaxpr=map_jaxpr(carry_number, body),
        cond_jaxpr=map_jaxpr(ignore_number, eqn.params["cond_jaxpr"]),
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
