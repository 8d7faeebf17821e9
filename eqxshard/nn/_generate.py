"""`generate`: new tokens after a prompt, one at a time."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from .._errors import UsageError
from ..transforms._dtypes import at_least_float32
from ._kv_cache import KVCache


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
    """Sample tokens after a prompt.

    The prompt is computed at once and each new token from the one before, with a cache of
    what came earlier. Call it inside `jax.jit` or [`eqxshard.filter_jit`][], with the
    model's arrays as arguments: then it runs on the devices that the model is on, and
    draws the same random numbers on any number of them.

    **Arguments:**

    - `apply`: a function of tokens and the cache, that returns the logits after the last of
        the tokens, and the cache with all of them added. It is called with the whole prompt
        first, and then with one token of each sequence at a time.
    - `cache`: an empty cache, such as an [`eqxshard.nn.KVCache`][] or several of them.
    - `prompt`: one token at least, as many for each sequence.
    - `length`: how many tokens to add.
    - `key`: a random key.
    - `temperature`: what logits are divided by; 0 for the most likely token.
    - `top_k`: choose among this many of the most likely tokens; among all by default.
    - `top_p`: choose among the fewest tokens that together have this probability (Holtzman
        et al. 2019, https://arxiv.org/abs/1904.09751); among all by default.

    **Returns:**

    The prompt and the new tokens; -1 for a token whose logits are NaN.

    **Raises:**

    `ValueError` if an argument is out of its range, or a `KVCache` is too small.

    !!! Example

        ```python
        @eqxshard.filter_jit
        def sample(model, prompt, key):
            cache = eqxshard.nn.KVCache.empty((layers, len(prompt), 1024, heads, head_dim))
            return eqxshard.nn.generate(
                model.decode, cache, prompt, 100, key=key, temperature=0.8, top_k=50
            )
        ```
    """
    _check(length, temperature, top_k, top_p)
    _check_capacity(cache, prompt.shape[1], length)
    if length == 0:
        return prompt

    def draw(logits: Array, number: Array) -> Array:
        if temperature == 0:
            tokens = jnp.argmax(logits, axis=-1)
        else:
            likely = keep_likely(at_least_float32(logits) / temperature, top_k, top_p)
            tokens = jax.random.categorical(jax.random.fold_in(key, number), likely)
        failed = jnp.any(jnp.isnan(logits), axis=-1)  # A cache that is full, say.
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
    """Make all logits -inf but those of the likeliest tokens."""
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


def _check(length: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    good_k, good_p = top_k is None or top_k >= 1, top_p is None or 0 < top_p <= 1
    if length < 0 or temperature < 0 or not (good_k and good_p):
        raise UsageError(
            f"{length=}, {temperature=}, {top_k=} or {top_p=} is out of range; give a "
            "length and a temperature of 0 or more, a top_k of 1 or more, and a top_p "
            "above 0 and up to 1 (None for all tokens)."
        )


def _check_capacity(cache: PyTree, prompt: int, length: int) -> None:
    """The last token need not be in the cache."""
    if prompt < 1:
        raise UsageError("the prompt is empty; give at least one token, such as an end.")
    for part in jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, KVCache)):
        if isinstance(part, KVCache) and part.capacity < prompt + length - 1:
            raise UsageError(
                f"a prompt of {prompt} tokens and {length} more do not fit a cache of "
                f"{part.capacity}; make it for {prompt + length}, or ask for fewer tokens."
            )
