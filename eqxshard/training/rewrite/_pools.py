"""`fast_pool`: average pools in the form that is fast on CPUs.

The windows of a pool, and of its gradient, run as a loop that nothing is fused with (JAX
0.10 to 0.12). The sum over dims of a reshaped array, and a broadcast, are fused with what
is before them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array

from ._jaxprs import call_equation


def fast_pool(eqn: Any, made_by: Mapping[Any, Any]) -> Any:
    """Rewrite a sum over windows, if it is a pool or the gradient of one.

    `made_by` has the equation that each variable is a result of.
    """
    params = eqn.params
    if _is_pool(params):
        return call_equation(partial(_pool, window=params["window_dimensions"]), eqn)
    if (pad := _padding_before(eqn, made_by)) is not None:
        window, shape = params["window_dimensions"], eqn.outvars[0].aval.shape
        spread = partial(_spread, window=window, shape=shape)
        return call_equation(spread, eqn, pad.invars[:1])
    return eqn


def _is_pool(params: Mapping[str, Any]) -> bool:
    """Whether windows follow each other, without padding."""
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
    # Its last rows and columns may fill no window.
    ends = [count * size for count, size in zip(counts, window, strict=True)]
    x = jax.lax.slice(x, [0] * x.ndim, ends)
    x = x.reshape([n for pair in zip(counts, window, strict=True) for n in pair])
    return jax.lax.reduce_sum(x, tuple(range(1, x.ndim, 2)))


def _padding_before(eqn: Any, made_by: Mapping[Any, Any]) -> Any:
    """The equation that pads the gradient of a pool, if this sums that over windows."""
    (padded,), params = eqn.invars, eqn.params
    pad = None if isinstance(padded, core.Literal) else made_by.get(padded)
    if pad is None or pad.primitive.name != "pad":
        return None
    zero, ones = pad.invars[1], (*params["window_strides"], *params["base_dilation"])
    if not isinstance(zero, core.Literal) or zero.val != 0:
        return None
    alone = all(
        # Of all positions of a window, one has an entry, but for those after the last.
        low == inner == size - 1 <= high
        for (low, high, inner), size in zip(
            pad.params["padding_config"], params["window_dimensions"], strict=True
        )
    )
    plain = all(low == high == 0 for low, high in params["padding"])
    return pad if alone and plain and all(x == 1 for x in ones) else None


def _spread(slope: Array, *, window: Sequence[int], shape: Sequence[int]) -> Array:
    """The gradient of `_pool`: each entry, at all positions of its window."""
    sizes = [size for pair in zip(slope.shape, window, strict=True) for size in pair]
    spread = jax.lax.broadcast_in_dim(slope, sizes, range(0, 2 * slope.ndim, 2))
    spread = spread.reshape([n * size for n, size in zip(slope.shape, window, strict=True)])
    left = [(0, n - covered, 0) for n, covered in zip(shape, spread.shape, strict=True)]
    return jax.lax.pad(spread, jnp.zeros((), spread.dtype), left)
