"""Exact attention over a sequence that is split over devices."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from .._errors import UsageError
from ..sharding._explicit import on_auto_axes
from ..transforms._dtypes import accumulation_dtype
from ._ring import find_ring
from ._ring_blocks import (
    Blocks,
    attend_ring,
    balance,
    from_chunks,
    from_groups,
    send_back,
    to_chunks,
    to_groups,
)


@on_auto_axes(like="query")
def ring_attention(
    query: Float[Array, "*batch seq heads dim"],
    key: Float[Array, "*batch seq kv_heads dim"],
    value: Float[Array, "*batch seq kv_heads dim"],
    *,
    causal: bool = False,
    window: int | None = None,
    segments: Int[Array, "*batch seq"] | None = None,
    scale: float | None = None,
    axis: str = "context",
) -> Float[Array, "*batch seq heads dim"]:
    """Softmax attention over a sequence that is split over a mesh axis.

    Each device keeps its part of the queries and passes its part of the keys and values
    around a ring, so no device ever holds the whole sequence (Liu et al. 2023, Ring
    Attention, https://arxiv.org/abs/2310.01889). The result is exact: the softmax is
    computed online (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867), in
    float32 or better. The gradient goes around the ring again and recomputes the scores,
    so memory grows with a device's part of the sequence, not with its square, in both
    directions.

    It runs on the mesh that a step of [`eqxshard.make_train_step`][] sets for a model,
    like [`eqxshard.constrain`][]. Without a mesh it computes the same on the whole
    sequence, so the model needs no mesh. In per-device code of [`jax.shard_map`][] over
    `axis` it takes and returns the device's own parts. Batch and heads stay split as they
    are.

    On a ring of n devices, keys and values are sent n - 1 times. For the gradient they are
    sent n - 1 times again, and so are their gradients, in float32, and then once back.

    With `causal=True` a device would compute more the later its part of the sequence is. So
    devices first exchange halves of their parts: then each has an early and a late half,
    the same work in each step, and half the work of attention that is not causal. Besides
    the keys and values on the ring, half a part of the query, the key, the value and the
    output is sent once, and for the gradient half a part of the gradients of output and
    query. With a `window` the parts stay where they are, and keys and values go only as far
    around as the window reaches.

    **Arguments:**

    - `query`, `key`, `value`: as for `jax.nn.dot_product_attention`; under `jax.vmap`,
        those of one example. Several heads of queries may share one of keys and values
        (grouped queries), which is sent only once for all of them.
    - `causal`: whether a position sees only itself and earlier ones.
    - `window`: with `causal`, how many positions one sees at most: itself and the
        `window - 1` before it.
    - `segments`: the segment of each position, such as the document that it belongs to; a
        position sees its own segment only. They travel with the keys.
    - `scale`: the factor of the scores; `1 / sqrt(dim)` by default.
    - `axis`: the mesh axis that the sequence is split over.

    **Returns:**

    An array of the shape and dtype of `query`. (It has reverse-mode derivatives only.)

    **Raises:**

    `ValueError` if the shapes do not fit each other, there is a `window` without `causal`,
    the mesh has no such axis, or the sequence does not divide over it.

    !!! Example

        ```python
        x = eqxshard.constrain(x, P("context"))
        query, key, value = (jax.vmap(f)(x).reshape(-1, heads, dim) for f in self.qkv)
        out = eqxshard.parallel.ring_attention(query, key, value, causal=True)
        ```
    """
    check_shapes("ring_attention", query, key, value, segments)
    window = check_window("ring_attention", window, causal, key)
    length, keys = query.shape[-3], key.shape[-3]
    if length != keys:
        raise UsageError(
            f"ring_attention: {length} queries and {keys} keys; give the same number of "
            "both, or use eqxshard.nn.attention."
        )
    ring = find_ring("ring_attention", axis)
    if ring.mesh is not None:
        ring.check_divides(length, "positions of the sequence")
        length //= ring.size
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    group = query.shape[-2] // key.shape[-2]
    blocks = Blocks(ring, length, group, causal, window, factor)
    return _attention(blocks, query, key, value, segments)


def check_shapes(
    name: str, query: Array, key: Array, value: Array, segments: Array | None
) -> None:
    """Raise `ValueError` unless the arrays of attention fit each other."""
    fits = query.ndim == key.ndim >= 3 and key.shape == value.shape
    fits = fits and (*query.shape[:-3], query.shape[-1]) == (*key.shape[:-3], key.shape[-1])
    if (
        not fits
        or 0 in (*query.shape[-3:], *key.shape[-3:])
        or query.shape[-2] % key.shape[-2]
    ):
        raise UsageError(
            f"{name}: query, key and value have the shapes {query.shape}, {key.shape} and "
            f"{value.shape}; give query (*batch, seq, heads, dim), and key and value "
            "(*batch, keys, kv_heads, dim), with sizes of at least 1 and a number of heads "
            "that is a multiple of kv_heads."
        )
    if segments is not None and segments.shape != query.shape[:-2]:
        raise UsageError(
            f"{name}: segments have the shape {segments.shape} and query {query.shape}; "
            f"give segments the shape {query.shape[:-2]}, one for each position."
        )


def check_window(name: str, window: int | None, causal: bool, key: Array) -> int | None:
    """The window, or `None` if it holds all keys.

    **Raises:**

    `ValueError` if it is less than 1, or attention is not causal.
    """
    if window is None:
        return None
    if window < 1 or not causal:
        raise UsageError(
            f"{name}: {window=} with {causal=}; give a window of at least 1, and "
            "causal=True."
        )
    return None if window >= key.shape[-3] else window


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    blocks: Blocks, query: Array, key: Array, value: Array, segments: Array | None
) -> Array:
    return _attention_fwd(blocks, query, key, value, segments)[0]


def _attention_fwd(
    blocks: Blocks, query: Array, key: Array, value: Array, segments: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    outs = _on_blocks(blocks, _forward, query, key, value, segments)
    # Named, so that a policy of jax.checkpoint can keep all that the gradient needs.
    out, logsumexp = (checkpoint_name(x, "attention") for x in outs[:2])
    return out, (*outs[2:], out, logsumexp)


def _attention_bwd(
    blocks: Blocks, residuals: tuple[Any, ...], grad: Array
) -> tuple[Array | None, ...]:
    return *_on_blocks(blocks, _backward, *residuals, grad), None


_attention.defvjp(_attention_fwd, _attention_bwd)


def _on_blocks(blocks: Blocks, fn: Callable[..., Any], *args: Array | None) -> Any:
    """Call a function on each device's blocks; the first argument is the query."""
    query, axis = args[0], blocks.ring.axis
    assert query is not None
    spec = PartitionSpec(*[None] * (query.ndim - 3), axis)
    return blocks.ring.run(ft.partial(fn, blocks), (spec,) * len(args), spec, *args)


def _forward(
    blocks: Blocks,
    rank: Array | None,
    query: Float[Array, "*batch block heads dim"],
    key: Float[Array, "*batch block kv_heads dim"],
    value: Float[Array, "*batch block kv_heads dim"],
    segments: Int[Array, "*batch block"] | None,
) -> tuple[Array | None, ...]:
    """The block's output, the logsumexp of its scores, and its balanced arguments."""
    if segments is not None:
        segments = segments[..., None, None]
    query, key, value, segments = balance(blocks, (query, key, value, segments))
    if segments is not None:
        segments = segments[..., 0, 0]
    q, k, v = to_groups(blocks, query), to_chunks(blocks, key), to_chunks(blocks, value)

    def attend_chunk(
        queries: Any, query_sums: Any, keys: Any, key_sums: Any, mask: Array | None
    ) -> Any:
        (q,), (k, v), (weighted, total, running_max) = queries, keys, query_sums
        scores = _scores(blocks, q, k, mask)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(running_max - new_max)
        total = rescale * total + jnp.sum(weights, axis=-1, keepdims=True)
        weighted = rescale * weighted + _dot("...qk,...kd->...qd", weights, v)
        return (weighted, total, new_max), key_sums

    weighted, total = _zero_sums(q), _zero_sums(q[..., :1])
    # Finite, because a query may see no key of the first chunk.
    running_max = jnp.full_like(total, jnp.finfo(total.dtype).min)
    query_sums = (weighted, total, running_max)
    (weighted, total, running_max), _ = attend_ring(
        blocks, rank, attend_chunk, (q,), query_sums, (k, v), (), segments
    )
    out = from_groups(blocks, weighted / total).astype(query.dtype)
    logsumexp = from_groups(blocks, running_max + jnp.log(total))[..., 0]
    return balance(blocks, out), logsumexp, query, key, value, segments


def _backward(
    blocks: Blocks,
    rank: Array | None,
    query: Float[Array, "*batch block heads dim"],
    key: Float[Array, "*batch block kv_heads dim"],
    value: Float[Array, "*batch block kv_heads dim"],
    segments: Int[Array, "*batch block"] | None,
    out: Float[Array, "*batch block heads dim"],
    logsumexp: Float[Array, "*batch block heads"],
    grad: Float[Array, "*batch block heads dim"],
) -> tuple[Float[Array, "*batch block _ dim"], ...]:
    """The gradients of the block's query, key and value, from balanced arguments."""
    # The derivative of the softmax subtracts the weighted mean of the gradient.
    dtype = logsumexp.dtype
    mean = jnp.sum(grad.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)
    grad, mean = balance(blocks, (grad, mean))
    of_queries = (query, grad, logsumexp[..., None], mean)
    queries = tuple(to_groups(blocks, x) for x in of_queries)
    k, v = keys = to_chunks(blocks, key), to_chunks(blocks, value)

    def attend_chunk(
        queries: Any, query_sums: Any, keys: Any, key_sums: Any, mask: Array | None
    ) -> Any:
        (q, g, logsumexp, mean), (k, v) = queries, keys
        dq, (dk, dv) = query_sums, key_sums
        weights = jnp.exp(_scores(blocks, q, k, mask) - logsumexp)
        dscores = weights * (_dot("...qd,...kd->...qk", g, v) - mean) * blocks.scale
        dq += _dot("...qk,...kd->...qd", dscores, k)
        dk += _dot("...qk,...qd->...kd", dscores, q)
        dv += _dot("...qk,...qd->...kd", weights, g)
        return dq, (dk, dv)

    dq, key_sums = _zero_sums(queries[0]), (_zero_sums(k), _zero_sums(v))
    dq, (dk, dv) = attend_ring(
        blocks, rank, attend_chunk, queries, dq, keys, key_sums, segments
    )
    dq = balance(blocks, from_groups(blocks, dq).astype(query.dtype))
    dk, dv = (from_chunks(blocks, dx).astype(key.dtype) for dx in (dk, dv))
    return dq, *send_back(blocks, (dk, dv))


def _zero_sums(x: Array) -> Array:
    return jnp.zeros_like(x, dtype=accumulation_dtype(x.dtype))


def _dot(subscripts: str, x: Array, y: Array) -> Array:
    """A product in the dtype of `y`, an input of attention, summed in float32 or better."""
    return jnp.einsum(
        subscripts,
        x.astype(y.dtype),
        y,
        preferred_element_type=accumulation_dtype(y.dtype),
    )


def _scores(blocks: Blocks, q: Array, k: Array, mask: Array | None) -> Array:
    scores = blocks.scale * _dot("...qd,...kd->...qk", q, k)
    if mask is None:
        return scores
    return jnp.where(jnp.broadcast_to(mask, scores.shape), scores, -jnp.inf)
