"""`KVCache`: the keys and values of the tokens before, for decoding."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from .._errors import UsageError


class KVCache(eqx.Module):
    """The keys and values of the tokens so far, in arrays of a fixed size.

    A cache for stacked layers has a leading dim of layers, in `length` too, so that
    `jax.lax.scan` over the layers gives each its own and stacks what they return.

    **Arguments:**

    - `key`, `value`: arrays of `capacity` positions.
    - `length`: how many of these positions are taken.

    !!! Example

        ```python
        def __call__(self, x, cache):
            query, key, value = self.project(x)
            offset, cache = cache.length, cache.append(key, value)
            y = eqxshard.nn.attention(
                query, cache.key, cache.value, causal=True, offset=offset
            )
            return self.out(y), cache
        ```
    """

    key: Float[Array, "*layers batch capacity kv_heads head_dim"]
    value: Float[Array, "*layers batch capacity kv_heads head_dim"]
    length: Int[Array, "*layers"]

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any = jnp.float32) -> "KVCache":
        """A cache of no tokens.

        **Arguments:**

        - `shape`: `(batch, capacity, kv_heads, head_dim)`, after the number of layers if
            they are stacked.
        - `dtype`: that of the keys and values.

        **Returns:**

        A cache.

        **Raises:**

        `ValueError` if the shape has fewer dims.
        """
        if len(shape) < 4:
            raise UsageError(
                f"a cache of the shape {tuple(shape)} has too few dims; give (batch, "
                "capacity, kv_heads, head_dim), after the number of layers if any."
            )
        return KVCache(
            key=jnp.zeros(shape, dtype),
            value=jnp.zeros(shape, dtype),
            length=jnp.zeros(shape[:-4], jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """The number of positions, taken or not."""
        return self.key.shape[-3]

    def append(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
    ) -> "KVCache":
        """Add the keys and values of the next tokens, in one layer.

        **Arguments:**

        - `key`, `value`: of one token or more, for each sequence of the batch.

        **Returns:**

        A cache with them. Under jit, where the number of tokens is not known, those that
        no longer fit are written as NaN, and so is all that attends to them.

        **Raises:**

        `ValueError` if the cache is that of several layers, or of another shape, or there
        are more tokens than it has positions left.
        """
        batch, seq, *heads = key.shape
        fits = self.key.shape == (batch, self.capacity, *heads) and key.shape == value.shape
        known = fits and not isinstance(self.length, Tracer)
        taken = int(self.length) if known else 0
        if not fits or taken + seq > self.capacity:
            raise UsageError(
                f"keys {key.shape} and values {value.shape} do not fit a cache of "
                f"{self.key.shape} with {taken} positions taken; make it by "
                "KVCache.empty((batch, capacity, kv_heads, head_dim)) with a capacity of "
                "all tokens to come."
            )
        fits = self.length + seq <= self.capacity
        zero = jnp.zeros((), self.length.dtype)
        start = (zero, self.length, zero, zero)

        def write(old: Array, new: Array) -> Array:
            # JAX would write the last tokens over those that are there, and say nothing.
            new = jnp.where(fits, new.astype(old.dtype), jnp.asarray(jnp.nan, old.dtype))
            return jax.lax.dynamic_update_slice(old, new, start)

        return KVCache(
            key=write(self.key, key),
            value=write(self.value, value),
            length=self.length + seq,
        )
