"""Exact attention over a sequence that is split over devices.

- A *block* is the part of a sequence that one device holds. At each *step* of the ring a
  device meets its own queries (`mine`) with one block of keys and values (`theirs`),
  which came from the device `source`, its own first.
- A *chunk* is the part of a block that is met at once, so that the scores of two chunks
  are all that there ever is of the scores.
- Inside, arrays are `*batch heads seq dim`: products of the last two dims.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from ..rules import check_axis

#: The most queries, and keys, to compare at once.
CHUNK = 512


class _Ring(NamedTuple):
    """What a call is about, besides its arrays."""

    #: To split arrays on; `None` where they are whole, or split already.
    mesh: AbstractMesh | None
    axis: str
    size: int
    #: Of a block.
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

    Each device keeps its part of the queries, and passes its part of the keys and values
    around a ring, so that none ever holds the whole sequence (Liu et al. 2023, Ring
    Attention, https://arxiv.org/abs/2310.01889). The result is exact: the softmax is
    taken online (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867), in
    float32 or better. The gradient takes the ring again and computes the scores anew, so
    that memory, in both directions, grows with a device's part of the sequence and not
    with its square.

    It runs on the mesh that a step of [`eqxshard.make_train_step`][] sets for a model, as
    [`eqxshard.constrain`][] does. Where there is no mesh it computes the same on the whole
    sequence: the model needs no mesh. In per-device code of [`jax.shard_map`][] over
    `axis` it takes and returns the device's own parts. Batch and heads stay split as they
    are.

    On a ring of n devices, keys and values are sent n - 1 times; for the gradient they are
    sent n - 1 times again, and their gradients, in float32, n times. With `causal=True`
    every device still computes all n blocks, masked: the last one needs them all, and the
    others would only wait for it.

    **Arguments:**

    - `query`, `key`, `value`: arrays of one shape, as for
        `jax.nn.dot_product_attention`. Under `jax.vmap` they are those of one example.
    - `causal`: whether a position sees only itself and those before it.
    - `scale`: what to multiply the scores by; `1 / sqrt(dim)` by default.
    - `axis`: the mesh axis that the sequence is split over.

    **Returns:**

    An array of the shape and type of `query`. (It has reverse-mode derivatives, and no
    forward-mode ones.)

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
            f"{value.shape}; give all three the same, (*batch, seq, heads, dim), of at "
            "least 1 each."
        )
    mesh = jax.sharding.get_abstract_mesh()
    length, size, split = query.shape[-3], 1, None
    if not mesh.empty:
        check_axis(axis, mesh, "ring_attention")
        size = mesh.shape[axis]
        split = None if size == 1 or axis in mesh.manual_axes else mesh
    if split is not None:
        if length % size:
            below, above = length // size * size, -(-length // size) * size
            near = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"a sequence of length {length} does not divide over {axis}={size}; use a "
                f"multiple of {size}, such as {near}."
            )
        length //= size
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    ring = _Ring(split, axis, size, length, causal, factor)
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
    """Call a function on each device's blocks; all but the ring's axis stays automatic."""
    fn = ft.partial(fn, ring)
    if ring.mesh is None:
        rank = jax.lax.axis_index(ring.axis) if ring.size > 1 else None
        return fn(rank, *args)
    spec = PartitionSpec(*[None] * (args[0].ndim - 3), ring.axis)
    # Handed in, because JAX 0.10.1 cannot lower an axis_index in per-device code that is
    # inside of other per-device code.
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
    """The block's output, and the logarithm of the sum of its exponentiated scores."""
    q, k, v = (_inward(x) for x in (query, key, value))

    def meet(mine: Any, sums: Any, theirs: Any, nothing: Any, seen: Array | None) -> Any:
        (q,), (k, v), (weighted, total, top) = mine, theirs, sums
        scores = _scores(ring, q, k, seen)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights, fade = jnp.exp(scores - new_top), jnp.exp(top - new_top)
        total = fade * total + jnp.sum(weights, axis=-1, keepdims=True)
        weighted = fade * weighted + _dot("...qk,...kd->...qd", weights, v)
        return (weighted, total, new_top), nothing

    weighted, total = _zeros(q), _zeros(q[..., :1])
    # No query has met a key yet; all see one in the first chunk, so that it gets finite.
    top = jnp.full_like(total, -jnp.inf)
    sums = (weighted, total, top)
    (weighted, total, top), _ = _around(ring, rank, meet, (q,), sums, (k, v), ())
    out = _outward(ring, weighted / total).astype(query.dtype)
    return out, _outward(ring, top + jnp.log(total))[..., 0]


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
    # What the softmax's own derivative takes off: the mean of the gradient by weight.
    wide = logsumexp.dtype
    mean = jnp.sum(grad.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
    mine = tuple(_inward(x) for x in (query, grad, logsumexp[..., None], mean))
    k, v = theirs = _inward(key), _inward(value)

    def meet(mine: Any, sums: Any, theirs: Any, their_sums: Any, seen: Array | None) -> Any:
        (q, g, logsumexp, mean), (k, v) = mine, theirs
        dq, (dk, dv) = sums, their_sums
        weights = jnp.exp(_scores(ring, q, k, seen) - logsumexp)
        dscores = weights * (_dot("...qd,...kd->...qk", g, v) - mean) * ring.scale
        dq += _dot("...qk,...kd->...qd", dscores, k)
        dk += _dot("...qk,...qd->...kd", dscores, q)
        dv += _dot("...qk,...qd->...kd", weights, g)
        return dq, (dk, dv)

    their_sums = (_zeros(k), _zeros(v))
    dq, (dk, dv) = _around(ring, rank, meet, mine, _zeros(mine[0]), theirs, their_sums)
    return tuple(
        _outward(ring, dx).astype(x.dtype)
        for dx, x in ((dq, query), (dk, key), (dv, value))
    )


def _around(
    ring: _Ring,
    rank: Array | None,
    meet: Callable[..., Any],
    mine: PyTree,
    sums: PyTree,
    theirs: PyTree,
    their_sums: PyTree,
) -> tuple[PyTree, PyTree]:
    """Meet the blocks of all devices; what was summed up for a block goes home with it."""
    if rank is None:
        return _chunked(ring, meet, 0, mine, sums, theirs, their_sums)

    def pass_on(blocks: PyTree) -> PyTree:
        ahead = [(i, (i + 1) % ring.size) for i in range(ring.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, ahead), blocks)

    def step(number: Any, sums: PyTree, theirs: PyTree, their_sums: PyTree) -> Any:
        source = (rank - number) % ring.size
        distance = (rank - source) * ring.length
        return _chunked(ring, meet, distance, mine, sums, theirs, their_sums)

    def body(carry: tuple[PyTree, ...], number: Array) -> tuple[tuple[PyTree, ...], None]:
        sums, theirs, their_sums = carry
        # Sent before it is used, so that the next block travels meanwhile.
        following = pass_on(theirs)
        sums, their_sums = step(number, sums, theirs, their_sums)
        return (sums, following, pass_on(their_sums)), None

    # A loop, because an unrolled ring may hold all of its blocks at once.
    numbers = jnp.arange(ring.size - 1, dtype=jnp.int32)
    carry, _ = jax.lax.scan(body, (sums, theirs, their_sums), numbers)
    sums, their_sums = step(ring.size - 1, *carry)
    return sums, pass_on(their_sums)


def _chunked(
    ring: _Ring,
    meet: Callable[..., Any],
    distance: Any,
    mine: PyTree,
    sums: PyTree,
    theirs: PyTree,
    their_sums: PyTree,
) -> tuple[PyTree, PyTree]:
    """Meet a block that begins `distance` before one's own, chunk by chunk."""
    count, size = _chunks(ring.length)

    def take(tree: PyTree, i: Array) -> PyTree:
        cut = ft.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=-2)
        return jax.tree.map(lambda x: cut(x, i * size), tree)

    def put(tree: PyTree, chunk: PyTree, i: Array) -> PyTree:
        paste = ft.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
        return jax.tree.map(lambda x, part: paste(x, part, i * size), tree, chunk)

    def seen(i: Array, j: Array) -> Array | None:
        """Which keys of chunk `j` the queries of chunk `i` see, if not all."""
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

    def row(i: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        sums, their_sums = state
        chunk = take(mine, i)

        def column(j: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            chunk_sums, their_sums = state
            chunk_sums, part = meet(
                chunk, chunk_sums, take(theirs, j), take(their_sums, j), seen(i, j)
            )
            return chunk_sums, put(their_sums, part, j)

        # The same on all devices at each step, lest one waits in a collective, which the
        # compiler put here, for another that is not coming.
        stop = jnp.where(distance == 0, i + 1, count) if ring.causal else count
        chunk_sums, their_sums = jax.lax.fori_loop(
            0, stop, column, (take(sums, i), their_sums)
        )
        return put(sums, chunk_sums, i), their_sums

    return jax.lax.fori_loop(0, count, row, (sums, their_sums))


def _chunks(length: int) -> tuple[int, int]:
    """How many chunks a block has, and the size of each; the last may not be full."""
    count = -(-length // CHUNK)
    return count, -(-length // count)


def _inward(
    x: Float[Array, "*batch block heads dim"],
) -> Float[Array, "*batch heads padded dim"]:
    """Heads first, and full chunks."""
    length = x.shape[-3]
    count, size = _chunks(length)
    widths = [(0, 0)] * (x.ndim - 2) + [(0, count * size - length), (0, 0)]
    return jnp.pad(jnp.swapaxes(x, -3, -2), widths)


def _outward(
    ring: _Ring, x: Float[Array, "*batch heads padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    return jnp.swapaxes(x[..., : ring.length, :], -3, -2)


def _zeros(x: Array) -> Array:
    return jnp.zeros_like(x, dtype=_wide(x))


def _wide(x: Array) -> Any:
    """What to sum up in: float32 or better."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _dot(what: str, x: Array, y: Array) -> Array:
    """A product in the type of `y`, which came from outside, summed up in float32."""
    return jnp.einsum(what, x.astype(y.dtype), y, preferred_element_type=_wide(y))


def _scores(ring: _Ring, q: Array, k: Array, seen: Array | None) -> Array:
    scores = ring.scale * _dot("...qd,...kd->...qk", q, k)
    if seen is None:
        return scores
    return jnp.where(jnp.broadcast_to(seen, scores.shape), scores, -jnp.inf)
