"""How steps are compiled: as `jax.jit` does, and on CPUs so that convolutions are fast.

What XLA makes of a convolution on CPUs (JAX 0.10 to 0.12) depends on two things that have
nothing to do with what it computes:

- By default it goes to YNNPACK, which takes five times as long as XLA's own kernel for the
  gradient of a weight.
- XLA's own kernel takes dims in one order only. XLA brings others into that order, but not
  in loops: there, every other order is computed by a plain loop, ten times as slow. JAX
  differentiates into other orders, and `equinox.nn.Conv` has another from the start.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array

#: XLA's own default without the convolutions.
_CPU_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": ",".join(
        f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("DOT", "INDIVIDUAL_DOT", "REDUCE")
    )
}


def jit_on(mesh: Mesh, fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a function of PyTrees of arrays, for the platform of a mesh's devices.

    **Arguments:**

    - `mesh`: where it is to run.
    - `fn`: a pure function.
    - `options`: for `jax.jit`.

    **Returns:**

    What `jax.jit` returns.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return jax.jit(fn, **options)
    return jax.jit(_in_order(fn), compiler_options=_CPU_OPTIONS, **options)


def _in_order(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the dims of its convolutions in the order of XLA's kernel."""

    @ft.wraps(fn)
    def ordered(*args: Any) -> Any:
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        flat = core.jaxpr_as_fun(_rewrite(jaxpr))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    return ordered


def _rewrite(part: Any) -> Any:
    """Rewrite what may be a jaxpr, of an equation's parameters."""
    # In this order: JAX 0.11 has one type for both.
    if isinstance(part, core.Jaxpr):
        return part.replace(eqns=[_rewrite_equation(eqn) for eqn in part.eqns])
    if isinstance(part, core.ClosedJaxpr):
        return part.replace(jaxpr=_rewrite(part.jaxpr))
    if isinstance(part, tuple):  # the branches of a condition
        return tuple(map(_rewrite, part)) if part and _is_jaxpr(part[0]) else part
    return part


def _is_jaxpr(part: Any) -> bool:
    return isinstance(part, core.ClosedJaxpr | core.Jaxpr)


def _rewrite_equation(eqn: Any) -> Any:
    if eqn.primitive is jax.lax.conv_general_dilated_p:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        ordered = jax.jit(ft.partial(_convolution, **eqn.params))
        (call,) = jax.make_jaxpr(ordered)(*shapes).eqns
        return call.replace(invars=eqn.invars, outvars=eqn.outvars)
    # Per-device code has types of its own, which say along which axes values vary.
    if eqn.primitive.name == "shard_map":
        return eqn
    return eqn.replace(params={name: _rewrite(part) for name, part in eqn.params.items()})


def _convolution(lhs: Array, rhs: Array, *, dimension_numbers: Any, **params: Any) -> Array:
    """A convolution, as (batch, ..., in) with (..., in, out) to (batch, ..., out)."""
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    last = lhs.ndim - 1
    batch_first = (0, last, *range(1, last))
    out = jax.lax.conv_general_dilated_p.bind(
        jnp.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1])),
        jnp.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0])),
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            batch_first, (last, last - 1, *range(last - 1)), batch_first
        ),
        **params,
    )
    order = (out_spec[0], *out_spec[2:], out_spec[1])
    return jnp.transpose(out, [order.index(dim) for dim in range(lhs.ndim)])
