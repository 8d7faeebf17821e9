"""The rule `fast_convolutions`: convolutions and pools in the form that is fast on CPUs.

The speed of a convolutional network on CPUs (JAX 0.10 to 0.12) depends on things that do
not change its result, apart from rounding:

- XLA's own kernel for convolutions takes dims in one order only. XLA transposes others into
  that order, but not in loops: there, any other order runs as a plain loop, ten times
  slower. JAX differentiates into other orders, and `equinox.nn.Conv` starts with another.
- For the gradient of a weight, that kernel needs transposed copies of its two operands,
  which take longer than it does. In a first layer, which has few input channels, patches of
  the input are small, and their product with the gradient of the output needs no copies.
- The gradient of an input pads the gradient of the output by almost the size of the kernel,
  and multiplies the padding, too. One kernel per row, and then the sum of their results in
  each row, needs no padding in that dim.
- The gradient of a bias sums over all dims but one in the middle, for which XLA writes a
  transposed copy, too. A product with a vector of ones needs none.
- The windows of an average pool, and of its gradient, run as a loop that nothing is fused
  with. Sums of a reshaped array, and broadcasts, are fused with what is before them.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._jax import Literal
from ...compiled._findings import REWRITTEN
from ._jaxprs import Apply

#: The types that XLA's own kernel for convolutions takes.
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def fast_convolutions(jaxpr: Any) -> dict[int, Apply]:
    """The rule for convolutions, their gradients, and pools, on CPUs."""
    made_by = {variable: eqn for eqn in jaxpr.eqns for variable in eqn.outvars}
    found = {}
    for i, eqn in enumerate(jaxpr.eqns):
        fn = _find_faster(eqn, made_by)
        if fn is not None:
            found[i] = partial(_apply, eqn, fn)
    return found


def _apply(eqn: Any, fn: Callable[..., Array], inputs: list[Any]) -> list[Array] | None:
    with jax.named_scope(REWRITTEN):
        out = fn(*inputs)
    aval = eqn.outvars[0].aval
    return [out] if (out.shape, out.dtype) == (aval.shape, aval.dtype) else None


def _find_faster(eqn: Any, made_by: Mapping[Any, Any]) -> Callable[..., Array] | None:
    """A faster function for an equation, if there is one."""
    name, params = eqn.primitive.name, eqn.params
    if name not in ("conv_general_dilated", "reduce_sum", "reduce_window_sum"):
        return None
    if not all(_is_plain(x.aval) for x in (*eqn.invars, *eqn.outvars)):
        return None
    if name == "conv_general_dilated":
        fn = _weight_gradient if _is_weight_gradient(eqn) else fast_convolution
        return partial(fn, **params)
    if name == "reduce_sum":
        return _bias_gradient if _is_bias_gradient(eqn) else None
    window = params["window_dimensions"]
    if _is_pool(params):
        return partial(_pool, window=window)
    if _is_pool_gradient(eqn, made_by):
        return partial(_spread, window=window, shape=eqn.outvars[0].aval.shape)
    return None


def _is_plain(aval: Any) -> bool:
    """True if a type is one of `_DTYPES`, and not split over Explicit axes of a mesh."""
    return aval.dtype in _DTYPES and not any(aval.sharding.spec)


def _channels_last(x: Array, spec: Sequence[int]) -> Array:
    """Move dims into the order (first of the spec, ..., second of the spec)."""
    return jnp.transpose(x, (spec[0], *spec[2:], spec[1]))


def _restore_order(x: Array, spec: Sequence[int]) -> Array:
    """The inverse of `_channels_last`."""
    order = (spec[0], *spec[2:], spec[1])
    return jnp.transpose(x, [order.index(dim) for dim in range(x.ndim)])


def fast_convolution(
    lhs: Array, rhs: Array, *, dimension_numbers: Any, **params: Any
) -> Array:
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


def _is_weight_gradient(eqn: Any) -> bool:
    """True if patches of the input are no larger than the gradient of the output.

    In the convolution that is the gradient of a weight, the batch are the input channels,
    the output's gradient slides over the input, and the result is as large as the weight.
    """
    params = eqn.params
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    lhs, rhs = (variable.aval.shape for variable in eqn.invars)
    window = math.prod(eqn.outvars[0].aval.shape[dim] for dim in out_spec[2:])
    return (
        params["feature_group_count"] == params["batch_group_count"] == 1
        and all(x == 1 for x in params["lhs_dilation"])
        and window < math.prod(rhs[dim] for dim in rhs_spec[2:])
        and window * lhs[lhs_spec[0]] <= rhs[rhs_spec[0]]
    )


def _weight_gradient(
    lhs: Array, rhs: Array, *, dimension_numbers: Any, **params: Any
) -> Array:
    """The product of all patches of the input and the gradient of the output."""
    lhs_spec, rhs_spec, out_spec = dimension_numbers
    # Both to (examples, ..., channels).
    x = _channels_last(lhs, (lhs_spec[1], lhs_spec[0], *lhs_spec[2:]))
    slope = _channels_last(rhs, (rhs_spec[1], rhs_spec[0], *rhs_spec[2:]))
    whole = (0, 0, 0)
    pads = [(low, high, 0) for low, high in params["padding"]]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [whole, *pads, whole])
    steps, strides = params["rhs_dilation"], params["window_strides"]
    sizes = [(n - 1) * step + 1 for n, step in zip(slope.shape[1:-1], steps, strict=True)]
    window = [
        (n - size) // stride + 1
        for n, size, stride in zip(x.shape[1:-1], sizes, strides, strict=True)
    ]

    def patch(place: Sequence[int]) -> Array:
        first = [i * stride for i, stride in zip(place, strides, strict=True)]
        end = [i + size for i, size in zip(first, sizes, strict=True)]
        limits = (x.shape[0], *end, x.shape[-1])
        return jax.lax.slice(x, (0, *first, 0), limits, (1, *steps, 1))

    positions = tuple(range(x.ndim - 1))
    out = jax.lax.dot_general(
        jnp.stack([patch(place) for place in itertools.product(*map(range, window))]),
        slope,
        ((tuple(dim + 1 for dim in positions), positions), ((), ())),
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )
    out = out.reshape(*window, *out.shape[1:])
    return _restore_order(jnp.moveaxis(out, -2, 0), out_spec)


def _is_bias_gradient(eqn: Any) -> bool:
    """True if all dims of images but the second are summed."""
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


def _is_pool(params: Mapping[str, Any]) -> bool:
    """True if windows follow each other, without padding."""
    window = params["window_dimensions"]
    dilations = (*params["base_dilation"], *params["window_dilation"])
    return (
        params["window_strides"] == window
        and all(low == high == 0 for low, high in params["padding"])
        and all(dilation == 1 for dilation in dilations)
    )


def _pool(x: Array, *, window: Sequence[int]) -> Array:
    """The sums of windows."""
    counts = [n // size for n, size in zip(x.shape, window, strict=True)]
    # The last rows and columns may fill no window.
    ends = [count * size for count, size in zip(counts, window, strict=True)]
    x = jax.lax.slice(x, [0] * x.ndim, ends)
    x = x.reshape([n for pair in zip(counts, window, strict=True) for n in pair])
    return jax.lax.reduce_sum(x, tuple(range(1, x.ndim, 2)))


def _is_pool_gradient(eqn: Any, made_by: Mapping[Any, Any]) -> bool:
    """True if a sum over windows is that of the padded gradient of a pool."""
    (padded,), params = eqn.invars, eqn.params
    pad = None if isinstance(padded, Literal) else made_by.get(padded)
    if pad is None or pad.primitive.name != "pad":
        return False
    zero, ones = pad.invars[1], (*params["window_strides"], *params["base_dilation"])
    if not isinstance(zero, Literal) or zero.val != 0:
        return False
    alone = all(
        # Each window has one entry; there may be more padding after the last entry.
        low == inner == size - 1 <= high
        for (low, high, inner), size in zip(
            pad.params["padding_config"], params["window_dimensions"], strict=True
        )
    )
    plain = all(low == high == 0 for low, high in params["padding"])
    return alone and plain and all(x == 1 for x in ones)


def _spread(padded: Array, *, window: Sequence[int], shape: Sequence[int]) -> Array:
    """The gradient of `_pool`: each entry, at all positions of its window.

    In the padded gradient, the entries are `window` apart.
    """
    first = [size - 1 for size in window]
    slope = jax.lax.slice(padded, first, padded.shape, window)
    # After the last entry, there may be padding for rows and columns that fill no window.
    counts = [n // size for n, size in zip(shape, window, strict=True)]
    slope = jax.lax.slice(slope, [0] * slope.ndim, counts)
    sizes = [size for pair in zip(slope.shape, window, strict=True) for size in pair]
    spread = jax.lax.broadcast_in_dim(slope, sizes, range(0, 2 * slope.ndim, 2))
    spread = spread.reshape([n * size for n, size in zip(slope.shape, window, strict=True)])
    left = [(0, n - covered, 0) for n, covered in zip(shape, spread.shape, strict=True)]
    return jax.lax.pad(spread, jnp.zeros((), spread.dtype), left)
