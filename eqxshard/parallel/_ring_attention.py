"""Exact attention over a sequence that is split over devices.

Glossary:

- a *block* is the part of a sequence that one device holds. In each *step* of the ring a
  device attends from its own block of queries to one block of keys and values, which
  comes from the device `source`; the first is its own;
- a *chunk* is the part of a block that is attended to at once, so that no more of the
  scores exists at a time than those between two chunks;
- inside, arrays are `*batch heads seq dim`, for products over the last two dims.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from ..sharding._spec import check_axis
from ..sharding._text import nearest_multiples
from ..transforms._dtypes import accumulation_dtype

#: The largest number of queries, and of keys, in a chunk.
CHUNK = 512


class _Ring(NamedTuple):
    """The static arguments of a call.

    - `mesh`: to split arrays over; `None` if they are whole, or split already.
    - `axis`, `size`: the mesh axis of the ring, and its number of devices.
    - `length`: the length of a block.
    """

    mesh: AbstractMesh | None
    axis: str
    size: int
    length: int
    causal: bool
    scale: float


def ring_attention(
    query: Float[Array, "*batch seq heads dim"],
    key: Float[Array, "*batch seq heads dim"],
    value: Float[Array, "*batch seq heads dim"],
    *,
    causal: bool = False,
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

    On a ring of n devices, keys and values are sent n - 1 times; for the gradient they are
    sent n - 1 times again, and their gradients, in float32, n times. With `causal=True`
    every device still computes all n blocks, masked: the last device needs them all, and
    the others would only wait for it.

    **Arguments:**

    - `query`, `key`, `value`: arrays of the same shape, as for
        `jax.nn.dot_product_attention`; under `jax.vmap`, those of one example.
    - `causal`: whether a position sees only itself and earlier ones.
    - `scale`: the factor of the scores; `1 / sqrt(dim)` by default.
    - `axis`: the mesh axis that the sequence is split over.

    **Returns:**

    An array of the shape and dtype of `query`. (It has reverse-mode derivatives only.)

    **Raises:**

    `ValueError` if the shapes differ, the mesh has no such axis, or the sequence does not
    divide over it.

    !!! Example

        ```python
        x = eqxshard.constrain(x, P("context"))
        query, key, value = (jax.vmap(f)(x).reshape(-1, heads, dim) for f in self.qkv)
        out = eqxshard.parallel.ring_attention(query, key, value, causal=True)
        ```
    """
    same = query.shape == key.shape == value.shape
    if not same or query.ndim < 3 or 0 in query.shape[-3:]:
        raise ValueError(
            f"query, key and value have the shapes {query.shape}, {key.shape} and "
            f"{value.shape}; give all three the same shape (*batch, seq, heads, dim), with "
            "sizes of at least 1."
        )
    mesh = jax.sharding.get_abstract_mesh()
    length, size, split_on = query.shape[-3], 1, None
    if not mesh.empty:
        check_axis(axis, mesh, "ring_attention")
        size = mesh.shape[axis]
        split_on = None if size == 1 or axis in mesh.manual_axes else mesh
    if split_on is not None:
        if length % size:
            raise ValueError(
                f"a sequence of length {length} does not divide over {axis}={size}; use a "
                f"multiple of {size}, such as {nearest_multiples(length, size)}."
            )
        length //= size
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    ring = _Ring(split_on, axis, size, length, causal, factor)
    return _attention(ring, query, key, value)


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, query: Array, key: Array, value: Array) -> Array:
    return _attention_fwd(ring, query, key, value)[0]


def _attention_fwd(
    ring: _Ring, query: Array, key: Array, value: Array
) -> tuple[Array, tuple[Array, ...]]:
    out, logsumexp = _on_blocks(ring, _forward, query, key, value)
    return out, (query, key, value, out, logsumexp)


def _attention_bwd(
    ring: _Ring, residuals: tuple[Array, ...], grad: Array
) -> tuple[Array, Array, Array]:
    return _on_blocks(ring, _backward, *residuals, grad)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _on_blocks(ring: _Ring, fn: Callable[..., Any], *args: Array) -> Any:
    """Call a function on each device's blocks; the other mesh axes stay automatic."""
    fn = ft.partial(fn, ring)
    if ring.mesh is None:
        rank = jax.lax.axis_index(ring.axis) if ring.size > 1 else None
        return fn(rank, *args)
    spec = PartitionSpec(*[None] * (args[0].ndim - 3), ring.axis)
    # Passed in, because JAX 0.10.1 cannot lower an axis_index in per-device code that is
    # inside other per-device code.
    ranks = jnp.arange(ring.size, dtype=jnp.int32)
    return jax.shard_map(
        lambda ranks, *args: fn(ranks[0], *args),
        mesh=ring.mesh,
        in_specs=(PartitionSpec(ring.axis), *[spec] * len(args)),
        out_specs=spec,
        axis_names={ring.axis},
    )(ranks, *args)


def _forward(
    ring: _Ring,
    rank: Array | None,
    query: Float[Array, "*batch block heads dim"],
    key: Float[Array, "*batch block heads dim"],
    value: Float[Array, "*batch block heads dim"],
) -> tuple[Float[Array, "*batch block heads dim"], Float[Array, "*batch block heads"]]:
    """The block's output, and the logsumexp of its scores."""
    q, k, v = (_to_chunks(x) for x in (query, key, value))

    def attend_chunk(
        queries: Any, query_sums: Any, keys: Any, key_sums: Any, mask: Array | None
    ) -> Any:
        (q,), (k, v), (weighted, total, running_max) = queries, keys, query_sums
        scores = _scores(ring, q, k, mask)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1, keepdims=True))
        weights, rescale = jnp.exp(scores - new_max), jnp.exp(running_max - new_max)
        total = rescale * total + jnp.sum(weights, axis=-1, keepdims=True)
        weighted = rescale * weighted + _dot("...qk,...kd->...qd", weights, v)
        return (weighted, total, new_max), key_sums

    weighted, total = _zero_sums(q), _zero_sums(q[..., :1])
    # Finite after the first chunk, in which every query sees a key.
    running_max = jnp.full_like(total, -jnp.inf)
    query_sums = (weighted, total, running_max)
    (weighted, total, running_max), _ = _attend_ring(
        ring, rank, attend_chunk, (q,), query_sums, (k, v), ()
    )
    out = _from_chunks(ring, weighted / total).astype(query.dtype)
    return out, _from_chunks(ring, running_max + jnp.log(total))[..., 0]


def _backward(
    ring: _Ring,
    rank: Array | None,
    query: Float[Array, "*batch block heads dim"],
    key: Float[Array, "*batch block heads dim"],
    value: Float[Array, "*batch block heads dim"],
    out: Float[Array, "*batch block heads dim"],
    logsumexp: Float[Array, "*batch block heads"],
    grad: Float[Array, "*batch block heads dim"],
) -> tuple[Float[Array, "*batch block heads dim"], ...]:
    """The gradients of the block's query, key and value."""
    # The derivative of the softmax subtracts the weighted mean of the gradient.
    dtype = logsumexp.dtype
    mean = jnp.sum(grad.astype(dtype) * out.astype(dtype), axis=-1, keepdims=True)
    queries = tuple(_to_chunks(x) for x in (query, grad, logsumexp[..., None], mean))
    k, v = keys = _to_chunks(key), _to_chunks(value)

    def attend_chunk(
        queries: Any, query_sums: Any, keys: Any, key_sums: Any, mask: Array | None
    ) -> Any:
        (q, g, logsumexp, mean), (k, v) = queries, keys
        dq, (dk, dv) = query_sums, key_sums
        weights = jnp.exp(_scores(ring, q, k, mask) - logsumexp)
        dscores = weights * (_dot("...qd,...kd->...qk", g, v) - mean) * ring.scale
        dq += _dot("...qk,...kd->...qd", dscores, k)
        dk += _dot("...qk,...qd->...kd", dscores, q)
        dv += _dot("...qk,...qd->...kd", weights, g)
        return dq, (dk, dv)

    key_sums = (_zero_sums(k), _zero_sums(v))
    dq, (dk, dv) = _attend_ring(
        ring, rank, attend_chunk, queries, _zero_sums(queries[0]), keys, key_sums
    )
    return tuple(
        _from_chunks(ring, dx).astype(x.dtype)
        for dx, x in ((dq, query), (dk, key), (dv, value))
    )


def _attend_ring(
    ring: _Ring,
    rank: Array | None,
    attend_chunk: Callable[..., Any],
    queries: PyTree,
    query_sums: PyTree,
    keys: PyTree,
    key_sums: PyTree,
) -> tuple[PyTree, PyTree]:
    """Attend to the blocks of all devices.

    - `attend_chunk`: called with chunks of the other arguments and a mask; returns the
      sums, with this pair of chunks added.
    - `queries`, `query_sums`: the arrays of the queries, and the sums over keys.
    - `keys`, `key_sums`: the arrays of the keys, and the sums over queries, which travel
      with their block and end up where they began.
    """
    if rank is None:
        return _attend_block(ring, attend_chunk, 0, queries, query_sums, keys, key_sums)

    def rotate(blocks: PyTree) -> PyTree:
        ahead = [(i, (i + 1) % ring.size) for i in range(ring.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, ahead), blocks)

    def step(number: Any, query_sums: PyTree, keys: PyTree, key_sums: PyTree) -> Any:
        source = (rank - number) % ring.size
        distance = (rank - source) * ring.length
        return _attend_block(
            ring, attend_chunk, distance, queries, query_sums, keys, key_sums
        )

    def body(carry: tuple[PyTree, ...], number: Array) -> tuple[tuple[PyTree, ...], None]:
        query_sums, keys, key_sums = carry
        # Sent before it is used, so that the next block arrives while this one is.
        next_keys = rotate(keys)
        query_sums, key_sums = step(number, query_sums, keys, key_sums)
        return (query_sums, next_keys, rotate(key_sums)), None

    # A loop, because an unrolled ring may hold all of its blocks at once.
    numbers = jnp.arange(ring.size - 1, dtype=jnp.int32)
    carry, _ = jax.lax.scan(body, (query_sums, keys, key_sums), numbers)
    query_sums, key_sums = step(ring.size - 1, *carry)
    return query_sums, rotate(key_sums)


def _attend_block(
    ring: _Ring,
    attend_chunk: Callable[..., Any],
    distance: Any,
    queries: PyTree,
    query_sums: PyTree,
    keys: PyTree,
    key_sums: PyTree,
) -> tuple[PyTree, PyTree]:
    """Attend to a block that begins `distance` before this device's own, in chunks."""
    count, size = _count_chunks(ring.length)

    def get(tree: PyTree, i: Array) -> PyTree:
        slice_chunk = ft.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=-2)
        return jax.tree.map(lambda x: slice_chunk(x, i * size), tree)

    def put(tree: PyTree, chunk: PyTree, i: Array) -> PyTree:
        update = ft.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
        return jax.tree.map(lambda x, part: update(x, part, i * size), tree, chunk)

    def make_mask(i: Array, j: Array) -> Array | None:
        """Which keys of chunk `j` the queries of chunk `i` see; `None` if all."""
        if not ring.causal and count * size == ring.length:
            return None
        rows, columns = (
            jax.lax.broadcasted_iota(jnp.int32, (size, size), d) for d in (0, 1)
        )
        columns += j.astype(jnp.int32) * size
        if not ring.causal:
            return columns < ring.length
        rows += i.astype(jnp.int32) * size + distance
        return (columns < ring.length) & (columns <= rows)

    def attend_row(i: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        query_sums, key_sums = state
        query_chunk = get(queries, i)

        def attend(j: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            chunk_sums, key_sums = state
            mask = make_mask(i, j)
            chunk_sums, key_chunk_sums = attend_chunk(
                query_chunk, chunk_sums, get(keys, j), get(key_sums, j), mask
            )
            return chunk_sums, put(key_sums, key_chunk_sums, j)

        # The same on all devices in each step. Otherwise one of them could wait forever in
        # a collective that the compiler put here, and another never reaches.
        stop = jnp.where(distance == 0, i + 1, count) if ring.causal else count
        chunk_sums, key_sums = jax.lax.fori_loop(
            0, stop, attend, (get(query_sums, i), key_sums)
        )
        return put(query_sums, chunk_sums, i), key_sums

    return jax.lax.fori_loop(0, count, attend_row, (query_sums, key_sums))


def _count_chunks(length: int) -> tuple[int, int]:
    """The number of chunks in a block, and their size; the last may not be full."""
    count = -(-length // CHUNK)
    return count, -(-length // count)


def _to_chunks(
    x: Float[Array, "*batch block heads dim"],
) -> Float[Array, "*batch heads padded dim"]:
    """Move the heads first, and pad the last chunk."""
    length = x.shape[-3]
    count, size = _count_chunks(length)
    widths = [(0, 0)] * (x.ndim - 2) + [(0, count * size - length), (0, 0)]
    return jnp.pad(jnp.swapaxes(x, -3, -2), widths)


def _from_chunks(
    ring: _Ring, x: Float[Array, "*batch heads padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `_to_chunks`."""
    return jnp.swapaxes(x[..., : ring.length, :], -3, -2)


def _zero_sums(x: Array) -> Array:
    return jnp.zeros_like(x, dtype=accumulation_dtype(x.dtype))


def _dot(subscripts: str, x: Array, y: Array) -> Array:
    """A product in the dtype of `y`, which is an input's, summed in float32 or better."""
    return jnp.einsum(
        subscripts,
        x.astype(y.dtype),
        y,
        preferred_element_type=accumulation_dtype(y.dtype),
    )


def _scores(ring: _Ring, q: Array, k: Array, mask: Array | None) -> Array:
    scores = ring.scale * _dot("...qd,...kd->...qk", q, k)
    if mask is None:
        return scores
    return jnp.where(jnp.broadcast_to(mask, scores.shape), scores, -jnp.inf)
