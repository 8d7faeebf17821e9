"""`attention`: softmax attention, by the fastest implementation on each backend."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from .._errors import UsageError
from ..parallel import ring_attention
from ..parallel._ring_attention import check_shapes, check_window
from ..parallel._ring_blocks import CHUNK
from ..sharding._explicit import on_auto_axes
from ..sharding._placement import constrain
from ..sharding._spec import AXES, check_axis
from ..transforms._dtypes import accumulation_dtype
from . import _cudnn


@on_auto_axes(like="query")
def attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    *,
    causal: bool = False,
    window: int | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    offset: Int[Array, ""] | int | None = None,
    scale: float | None = None,
    axis: str = "context",
) -> Float[Array, "batch seq heads head_dim"]:
    """Softmax attention, for training and decoding, on one device or any mesh.

    The result is exact, with the softmax in float32 or better. How it is computed depends
    on where:

    - on a mesh that splits the sequence over `axis`, by
        [`eqxshard.parallel.ring_attention`][];
    - compiled for NVIDIA GPUs, in bfloat16 and float16, by cuDNN's flash attention, with
        the calls of [`jax.nn.dot_product_attention`][], wherever cuDNN supports it;
    - elsewhere by plain matrix products, in chunks if the sequence is long.

    Memory does not grow with the square of the sequence, not even for packed documents: a
    long sequence of them reaches cuDNN in chunks of queries, each with a mask of the keys
    between the first and the last that it sees, and is computed again for the gradient.

    Batch and heads stay split over the axes of the batch and over `tensor`. The arrays that
    the gradient needs are named `"attention"`, for policies of [`jax.checkpoint`][] such as
    `save_only_these_names("attention")`; `remat="dots"` of [`eqxshard.scan_layers`][] keeps
    them.

    **Arguments:**

    - `query`, `key`, `value`: those of a whole batch. (Under `jax.vmap`, give each example
        a batch dim of 1.) `heads` is a multiple of `kv_heads`: several heads of queries
        may share one of keys and values.
    - `causal`: whether a position sees only itself and earlier ones.
    - `window`: with `causal`, how many positions one sees at most: itself and the
        `window - 1` before it. (The `local_window_size` of JAX's function is
        `(window - 1, 0)`.)
    - `segments`: the segment of each position; a position sees its own segment only. For
        documents packed into one sequence, and for padding on either side, which is a
        segment of its own.
    - `offset`: with `causal`, the index among the keys of the first query, for decoding
        with a cache of keys and values; a query sees the keys up to its own index.
    - `scale`: the factor of the scores; `1 / sqrt(head_dim)` by default.
    - `axis`: the mesh axis that the sequence is split over, if it is.

    **Returns:**

    An array of the shape and dtype of `query`.

    **Raises:**

    `ValueError` if the shapes do not fit each other, if causal attention has another number
    of keys than of queries and no `offset`, if there is an `offset` or a `window` without
    `causal`, if there are `segments` with an `offset` or with another number of keys, or if
    the mesh has no such axis.

    !!! Example

        ```python
        query, key = (eqxshard.nn.rotary(x, positions) for x in (query, key))
        out = eqxshard.nn.attention(query, key, value, causal=True, segments=segments)
        ```
    """
    check_shapes("attention", query, key, value, segments)
    if query.ndim != 4:
        raise UsageError(
            f"attention takes a batch, and query has the shape {query.shape}; give it the "
            "dims (batch, seq, heads, head_dim), such as query[None] of one example."
        )
    seq, keys = query.shape[-3], key.shape[-3]
    if offset is not None and (segments is not None or not causal):
        raise UsageError(
            "attention: an offset is for causal attention without segments; set "
            "causal=True and leave out segments, or leave out offset."
        )
    if seq != keys and offset is None and (segments is not None or causal):
        raise UsageError(
            f"attention: {seq} queries and {keys} keys; give the offset of the first query "
            "among the keys, or the same number of both."
        )
    window = check_window("attention", window, causal, key)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and axis not in AXES:
        check_axis(axis, mesh, "attention")
    if offset is not None or seq != keys:
        return _by_rows(query, key, value, offset, window, factor)
    arrays = (query, key, value) if segments is None else (query, key, value, segments)
    exact = ft.partial(_exact, causal, window, factor, axis)
    options = _cudnn.Options(causal, window, factor)
    if _is_split(axis) or not _cudnn.supports(options, query, key, segments):
        return exact(*arrays)
    cudnn = ft.partial(_cudnn.attend, options)
    return jax.lax.platform_dependent(*arrays, cuda=cudnn, default=exact)


def _is_split(axis: str) -> bool:
    """True if there is a mesh, and it splits arrays over an axis."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1


def _exact(
    causal: bool,
    window: int | None,
    scale: float,
    axis: str,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None = None,
) -> Array:
    """Self-attention on any backend."""
    seq = query.shape[-3]
    if seq > CHUNK or _is_split(axis):
        return ring_attention(
            query,
            key,
            value,
            causal=causal,
            window=window,
            segments=segments,
            scale=scale,
            axis=axis,
        )
    query, key, value = map(_whole, (query, key, value))
    seen = jnp.tri(seq, dtype=bool)[None] if causal else None
    if seen is not None and window is not None:
        seen &= ~jnp.tri(seq, k=-window, dtype=bool)[None]
    if segments is not None:
        same = segments[..., :, None] == segments[..., None, :]
        seen = same if seen is None else same & jnp.broadcast_to(seen, same.shape)
    out = _whole(_plain(query, key, value, seen, scale))
    return checkpoint_name(out, "attention")


def _whole(x: Float[Array, "batch seq heads head_dim"]) -> Array:
    """Keep sequences whole where the compiler would split them for experts.

    cuDNN needs that; elsewhere it makes the step the same on every platform.
    """
    if _is_split("expert"):
        rest = PartitionSpec.UNCONSTRAINED
        x = constrain(x, PartitionSpec(rest, None, rest, None))
    return x


def _by_rows(
    query: Array, key: Array, value: Array, offset: Any, window: int | None, scale: float
) -> Array:
    """Attention with another number of keys than of queries, in chunks of queries."""
    seq, keys = query.shape[1], key.shape[1]

    def attend(row: tuple[Int[Array, ""], Float[Array, "batch heads head_dim"]]) -> Array:
        position, query = row
        seen = None
        if offset is not None:
            distance = (position + offset - jnp.arange(keys))[None, None]
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
        return _plain(query[:, None], key, value, seen, scale)[:, 0]

    if seq > CHUNK:
        # The loop itself keeps XLA from undoing the checkpoint.
        attend = jax.checkpoint(attend, prevent_cse=False)
    rows = jnp.arange(seq), jnp.moveaxis(query, 1, 0)
    return jnp.moveaxis(jax.lax.map(attend, rows, batch_size=CHUNK), 0, 1)


def _plain(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    seen: Bool[Array, "#mask_batch seq keys"] | None,
    scale: float,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention by plain matrix products, with the heads before the sequence."""
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    batch, heads, seq, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    # The heads that share one of keys and values are rows of one product.
    rows = query.reshape(batch, kv_heads, -1, dim)
    dtype = accumulation_dtype(query.dtype)
    scores = scale * jnp.einsum("bhqd,bhkd->bhqk", rows, key, preferred_element_type=dtype)
    scores = scores.reshape(batch, heads, seq, keys)
    if seen is not None:
        seen = jnp.broadcast_to(seen[:, None], scores.shape)
        scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    out = weights.reshape(batch, kv_heads, -1, keys) @ value
    return jnp.swapaxes(out.reshape(query.shape), 1, 2)
