"""Attention over packed documents without a mask of seq x seq, in chunks of queries.

A chunk attends in one call to the keys between the first and the last that any of its
queries sees; their number is rounded up to a power of two of chunks. So memory grows with
the length of the sequence, and work with the lengths of the documents, however many.

cuDNN's own packed layout, as XLA offers it, is no alternative. It takes a fixed number of
documents, and gives each of them statistics and gradients of the queries, in float32, as
long as the whole sequence: for 32 documents in 8,192 tokens, with 32 heads of 128, these
take 4.3 GB, and a mask takes 0.1 GB.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

#: About how many queries are in a chunk, and the longest sequence that is a single chunk.
CHUNK = 1024


class Packed(NamedTuple):
    """The static arguments of a call.

    - `attend`: attention of a query, a key and a value with a mask.
    - `causal`, `window`: as for [`eqxshard.nn.attention`][].
    """

    attend: Callable[..., Array]
    causal: bool
    window: int | None


def forward(
    packed: Packed,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"],
) -> Float[Array, "batch seq heads head_dim"]:
    """The output of attention."""
    spans = _Spans(packed, segments)
    query, key, value = (spans.pad(x) for x in (query, key, value))

    def chunk(i: Array, out: Array) -> Array:
        def attend(start: Array, size: int) -> Array:
            keys = (_part(x, start, size) for x in (key, value))
            return packed.attend(spans.queries(query, i), *keys, spans.mask(i, start, size))

        return _put(out, spans.switch(i, attend), i * spans.chunk)

    out = jax.lax.fori_loop(0, spans.count, chunk, jnp.zeros_like(query))
    return out[:, : segments.shape[1]]


def backward(
    packed: Packed,
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    grad: Float[Array, "batch seq heads head_dim"],
    segments: Int[Array, "batch seq"],
) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value. Each chunk is computed again."""
    spans, seq = _Spans(packed, segments), segments.shape[1]
    query, key, value, grad = (spans.pad(x) for x in (query, key, value, grad))

    def chunk(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, *of_keys = sums

        def gradients(start: Array, size: int) -> tuple[Array, ...]:
            mask = spans.mask(i, start, size)
            parts = spans.queries(query, i), *(_part(x, start, size) for x in (key, value))
            back = jax.vjp(lambda *parts: packed.attend(*parts, mask), *parts)[1]
            dq, *more = back(spans.queries(grad, i))
            return dq, *(
                _put(x, _part(x, start, size) + dx.astype(x.dtype), start)
                for x, dx in zip(of_keys, more)
            )

        part, dk, dv = spans.switch(i, gradients)
        return _put(dq, part, i * spans.chunk), dk, dv

    sums = jnp.zeros_like(query), *(jnp.zeros_like(x, jnp.float32) for x in (key, value))
    dq, dk, dv = jax.lax.fori_loop(0, spans.count, chunk, sums)
    return tuple(dx[:, :seq].astype(query.dtype) for dx in (dq, dk, dv))


class _Spans:
    """Chunks of queries, and the keys that they see."""

    def __init__(self, packed: Packed, segments: Int[Array, "batch seq"]):
        seq = segments.shape[1]
        self.count = -(-seq // CHUNK)
        # A multiple of 64, which cuDNN computes without a remainder.
        self.chunk = 64 * -(-seq // (64 * self.count))
        self.packed, self.seq = packed, seq
        self.segments = self.pad(segments)
        powers = (2**i for i in range(self.count.bit_length()))
        self.sizes = [self.chunk * min(power, self.count) for power in powers]
        self.sizes = [*dict.fromkeys([*self.sizes, self.chunk * self.count])]

    def pad(self, x: Array) -> Array:
        rest = self.chunk * self.count - self.seq
        return jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2))

    def queries(self, x: Array, i: Array) -> Array:
        return _part(x, i * self.chunk, self.chunk)

    def mask(self, i: Array, start: Any, size: int) -> Bool[Array, "batch chunk keys"]:
        """Which of `size` keys, from `start` on, the queries of chunk `i` see."""
        rows = (i * self.chunk + jnp.arange(self.chunk, dtype=jnp.int32))[:, None]
        columns = (start + jnp.arange(size, dtype=jnp.int32))[None]
        seen = columns < self.seq
        if self.packed.causal:
            seen = seen & (columns <= rows)
        if self.packed.window is not None:
            seen &= columns > rows - self.packed.window
        of_rows = self.queries(self.segments, i)
        of_columns = _part(self.segments, start, size)
        same = of_rows[:, :, None] == of_columns[:, None, :]
        return same & jnp.broadcast_to(seen, same.shape)

    def switch(self, i: Array, fn: Callable[[Array, int], Any]) -> Any:
        """Call `fn(start, size)` for a range of keys with all that chunk `i` sees."""
        whole = self.sizes[-1]
        seen = jnp.any(self.mask(i, 0, whole), axis=(0, 1))
        first = jnp.argmax(seen).astype(jnp.int32)
        end = whole - jnp.argmax(seen[::-1]).astype(jnp.int32)
        sizes = np.asarray(self.sizes, np.int32)
        number = jnp.sum(end - first > sizes, dtype=jnp.int32)

        def branch(size: int) -> Callable[[Array], Any]:
            return lambda first: fn(jnp.minimum(first, whole - size), size)

        return jax.lax.switch(number, [branch(size) for size in self.sizes], first)


def _part(x: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _put(x: Array, part: Array, start: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)
