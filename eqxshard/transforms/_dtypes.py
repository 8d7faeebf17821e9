"""The precision to sum in: float32 at least."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def at_least_float32(x: Array) -> Array:
    """`x` in float32, unless it is as precise already or not floating-point."""
    return x.astype(accumulation_dtype(x.dtype))


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype in which to sum values of a dtype."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)
