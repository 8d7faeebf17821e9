"""`fast_convolutions`: convolutions in the form that is fast on CPUs.

The speed of a convolutional network on CPUs (JAX 0.10 to 0.12) depends on things that do
not change its result, apart from rounding:

- XLA's own kernel for convolutions takes dims in one order only. XLA transposes others into
  that order, but not in loops: there, any other order runs as a plain loop, ten times
  slower. JAX differentiates into other orders, and `equinox.nn.Conv` starts with another.
- The gradient of an input pads the gradient of the output by almost the size of the kernel,
  and multiplies the padding, too. One kernel per row, and then the sum of what they give
  for each row, needs no padding in that dim.
- The gradient of a bias sums over all dims but one in the middle, for which XLA writes a
  transposed copy, too. A product with a vector of ones needs none.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._jaxprs import call_equation, map_jaxprs_in

#: The types that XLA's own kernel for convolutions takes.
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
#: What runs the jaxprs in its parameters as they are, once or in a loop.
_CALLS = ("jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call")
_CONTROL_FLOW = ("cond", "scan", "while", "custom_linear_solve", "custom_vmap_call")


def fast_convolutions(jaxpr: Any) -> Any:
    """Rewrite the convolutions of a jaxpr, and their gradients, for CPUs."""
    return jaxpr.replace(eqns=[*map(_rewrite, jaxpr.eqns)])


def _rewrite(eqn: Any) -> Any:
    name, params = eqn.primitive.name, eqn.params
    # Not per-device code, nor kernels, in which other operations may be allowed.
    if name in _CALLS + _CONTROL_FLOW:
        return eqn.replace(params=map_jaxprs_in(fast_convolutions, params))
    if name not in ("conv_general_dilated", "reduce_sum"):
        return eqn
    if not all(_is_plain(x.aval) for x in (*eqn.invars, *eqn.outvars)):
        return eqn
    if name == "conv_general_dilated":
        return call_equation(partial(_convolution, **params), eqn)
    return call_equation(_bias_gradient, eqn) if _is_bias_gradient(eqn) else eqn


def _is_plain(aval: Any) -> bool:
    """Whether a type is one of `_DTYPES`, and not split over Explicit axes of a mesh."""
    return aval.dtype in _DTYPES and not any(aval.sharding.spec)


def _channels_last(x: Array, spec: Sequence[int]) -> Array:
    """Move dims into the order (first of the spec, ..., second of the spec)."""
    return jnp.transpose(x, (spec[0], *spec[2:], spec[1]))


def _restore_order(x: Array, spec: Sequence[int]) -> Array:
    """The inverse of `_channels_last`."""
    order = (spec[0], *spec[2:], spec[1])
    return jnp.transpose(x, [order.index(dim) for dim in range(x.ndim)])


def _convolution(lhs: Array, rhs: Array, *, dimension_numbers: Any, **params: Any) -> Array:
    """A convolution of (batch, ..., in) with (..., in, out) to (batch, ..., out)."""
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    lhs = _channels_last(lhs, lhs_spec)
    rhs = jnp.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    dim = _padded_dim(lhs, rhs, params)
    convolve = _in_order if dim is None else partial(_by_rows, dim=dim)
    return _restore_order(convolve(lhs, rhs, **params), out_spec)


def _in_order(lhs: Array, rhs: Array, **params: Any) -> Array:
    """A convolution of dims in the order that XLA's kernel takes."""
    last = lhs.ndim - 1
    batch_first = (0, last, *range(1, last))
    return jax.lax.conv_general_dilated_p.bind(
        lhs,
        rhs,
        dimension_numbers=jax.lax.ConvDimensionNumbers(
            batch_first, (last, last - 1, *range(last - 1)), batch_first
        ),
        **params,
    )


def _padded_dim(lhs: Array, rhs: Array, params: Mapping[str, Any]) -> int | None:
    """The first dim of images that padding makes longer by 15 % or more, if any.

    With less, the sums of the rows cost as much as is saved (3 x 3 kernels on 2 cores).
    """
    plain = params["feature_group_count"] == params["batch_group_count"] == 1 and all(
        x == 1
        for key in ("window_strides", "lhs_dilation", "rhs_dilation")
        for x in params[key]
    )
    if not plain or lhs.ndim < 4 or lhs.dtype != jnp.float32:
        return None
    for dim, (low, high) in enumerate(params["padding"]):
        rows, size = lhs.shape[dim + 1], rhs.shape[dim]
        longer = low + high - (size - 1)
        if min(low, high) >= 0 and longer >= 0.15 * rows:
            return dim
    return None


def _by_rows(
    lhs: Array, rhs: Array, *, dim: int, padding: Sequence[Any], **params: Any
) -> Array:
    """Each row of the kernel, as channels of their own, and then their sum.

    Row i of the input and row k of the kernel meet in row i - k + low of the output.
    """
    size, channels = rhs.shape[dim], rhs.shape[-1]
    # To (..., in, size * out), with a 1 at the dim.
    rows = jnp.moveaxis(rhs, dim, -2)
    rows = jnp.expand_dims(rows.reshape(*rows.shape[:-2], size * channels), dim)
    (low, high), whole = padding[dim], (0, 0)
    padding = (*padding[:dim], whole, *padding[dim + 1 :])
    out = _in_order(lhs, rows, padding=padding, **params)
    zero, parts = jnp.zeros((), out.dtype), []
    for k in range(size):
        part = jax.lax.slice_in_dim(out, k * channels, (k + 1) * channels, axis=-1)
        pads = [(0, 0, 0)] * out.ndim
        pads[dim + 1] = (low - k, high - (size - 1 - k), 0)
        parts.append(jax.lax.pad(part, zero, pads))
    return sum(parts[1:], start=parts[0])


def _is_bias_gradient(eqn: Any) -> bool:
    """Whether all dims of images but the second are summed."""
    aval = eqn.invars[0].aval
    summed = (0, *range(2, aval.ndim))
    if aval.ndim < 4 or aval.shape[0] == 1 or aval.dtype != jnp.float32:
        return False
    return eqn.params["axes"] == summed


def _bias_gradient(slope: Array) -> Array:
    rows = jnp.moveaxis(slope, 1, -1)
    dims = tuple(range(rows.ndim - 1))
    ones = jnp.ones(rows.shape[:-1], rows.dtype)
    return jax.lax.dot_general(ones, rows, ((dims, dims), ((), ())), precision="highest")
