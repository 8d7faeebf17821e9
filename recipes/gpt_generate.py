"""Sampling: new tokens after a prompt, one at a time, with a cache of keys and values."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree

import eqxshard


class KVCache(eqx.Module):
    """The keys and values of the tokens so far, in arrays of a fixed size.

    A cache for stacked layers has a leading dim of layers, in `length` too, so that
    `jax.lax.scan` over the layers gives each its own and stacks what they return.
    """

    key: Float[Array, "*layers batch capacity kv_heads head_dim"]
    value: Float[Array, "*layers batch capacity kv_heads head_dim"]
    length: Int[Array, "*layers"]

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any = jnp.float32) -> "KVCache":
        """An empty cache.

        The shape is `(batch, capacity, kv_heads, head_dim)`, after the number of layers if
        they are stacked.
        """
        if len(shape) < 4:
            raise eqxshard.UsageError(
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

        Under jit, where the number of tokens is not known, tokens that do not fit are
        written as NaN, and so is everything that attends to them.
        """
        batch, seq, *heads = key.shape
        fits = self.key.shape == (batch, self.capacity, *heads) and key.shape == value.shape
        known = fits and not isinstance(self.length, Tracer)
        taken = int(self.length) if known else 0
        if not fits or taken + seq > self.capacity:
            raise eqxshard.UsageError(
                f"keys {key.shape} and values {value.shape} do not fit a cache of "
                f"{self.key.shape} with {taken} positions taken; make it by "
                "KVCache.empty((batch, capacity, kv_heads, head_dim)) with a capacity for "
                "all tokens to come."
            )
        fits = self.length + seq <= self.capacity
        zero = jnp.zeros((), self.length.dtype)
        start = (zero, self.length, zero, zero)

        def write(old: Array, new: Array) -> Array:
            # JAX would overwrite the tokens before, without an error.
            new = jnp.where(fits, new.astype(old.dtype), jnp.asarray(jnp.nan, old.dtype))
            return jax.lax.dynamic_update_slice(old, new, start)

        return KVCache(
            key=write(self.key, key),
            value=write(self.value, value),
            length=self.length + seq,
        )


def generate(
    apply: Callable[
        [Int[Array, "batch seq"], PyTree], tuple[Float[Array, "batch vocab"], PyTree]
    ],
    cache: PyTree,
    prompt: Int[Array, "batch prompt"],
    length: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Array, "batch prompt+{length}"]:
    """Sample `length` tokens after a prompt; return both.

    Call it inside jit: the prompt is computed at once, and each new token from the one
    before. It runs on the devices that the model is on, and draws the same random numbers
    on any number of them. A token whose logits are NaN is -1.

    - `apply`: a function of tokens and the cache, which returns the logits after the last
        token, and the cache with all tokens added. Its first call is with the whole prompt.
    - `cache`: an empty cache, such as a `KVCache` or several of them.
    - `temperature`: the divisor of the logits; 0 for the most likely token.
    - `top_k`: choose among this many of the most likely tokens.
    - `top_p`: choose among the fewest tokens that together have this probability (Holtzman
        et al. 2019, https://arxiv.org/abs/1904.09751).
    """
    check_options(length, temperature, top_k, top_p)
    check_capacity(cache, prompt.shape[1], length)
    if length == 0:
        return prompt

    def draw(logits: Array, number: Array) -> Array:
        if temperature == 0:
            tokens = jnp.argmax(logits, axis=-1)
        else:
            wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
            likely = keep_likely(wide / temperature, top_k, top_p)
            tokens = jax.random.categorical(jax.random.fold_in(key, number), likely)
        failed = jnp.any(jnp.isnan(logits), axis=-1)  # The cache is full, for example.
        return jnp.where(failed, -1, tokens).astype(prompt.dtype)

    logits, cache = apply(prompt, cache)
    arrays, static = eqx.partition(cache, eqx.is_array)
    numbers = jnp.arange(length, dtype=jnp.int32)

    def step(carry: tuple[Array, PyTree], number: Array) -> tuple[PyTree, Array]:
        token, arrays = carry
        logits, cache = apply(token[:, None], eqx.combine(arrays, static))
        token = draw(logits, number)
        return (token, eqx.filter(cache, eqx.is_array)), token

    first = draw(logits, numbers[0])
    _, rest = jax.lax.scan(step, (first, arrays), numbers[1:])
    return jnp.concatenate([prompt, first[:, None], rest.T], axis=1)


def keep_likely(
    logits: Float[Array, "batch vocab"], top_k: int | None, top_p: float | None
) -> Float[Array, "batch vocab"]:
    """Set the logits of all but the likeliest tokens to -inf."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        chances = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances
        kept = jnp.where(before < top_p, ordered, jnp.inf)
        logits = jnp.where(logits < jnp.min(kept, axis=-1, keepdims=True), -jnp.inf, logits)
    return logits


def check_options(
    length: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    good_k, good_p = top_k is None or top_k >= 1, top_p is None or 0 < top_p <= 1
    if length < 0 or temperature < 0 or not (good_k and good_p):
        raise eqxshard.UsageError(
            f"{length=}, {temperature=}, {top_k=} or {top_p=} is out of range; give a "
            "length and a temperature of 0 or more, a top_k of 1 or more, and a top_p "
            "above 0 and up to 1 (None for all tokens)."
        )


def check_capacity(cache: PyTree, prompt: int, length: int) -> None:
    """Check that the prompt and all new tokens but the last fit the cache."""
    if prompt < 1:
        raise eqxshard.UsageError(
            "the prompt is empty; give at least one token, such as the end of a text."
        )
    for part in jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, KVCache)):
        if isinstance(part, KVCache) and part.capacity < prompt + length - 1:
            raise eqxshard.UsageError(
                f"a prompt of {prompt} tokens and {length} more do not fit a cache of "
                f"{part.capacity}; make it for {prompt + length}, or ask for fewer tokens."
            )
