"""Blocks of a sequence that go around a ring of devices, attended to in chunks.

Glossary:

- a *block* is the part of a sequence that one device holds. In each *step* of the ring a
  device attends from its own block of queries to one block of keys and values, which
  comes from the device `source`; the first is its own;
- a *chunk* is the part of a block that is attended to at once, so that no more of the
  scores exists at a time than those between two chunks;
- a *group* is the queries of several heads that share a head of keys and values;
- inside, arrays of keys are `*batch kv_heads seq dim` and those of queries `*batch
  kv_heads group seq dim`; in a chunk of queries the group and the sequence are one dim,
  the *rows*, for products over the last two dims.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from ._per_device import run_per_device, send_to_next

#: The largest number of queries, and of keys, in a chunk.
CHUNK = 512


class Ring(NamedTuple):
    """The static arguments of a call.

    - `mesh`: to split arrays over; `None` if they are whole, or split already.
    - `axis`, `size`: the mesh axis of the ring, and its number of devices.
    - `length`: the length of a block.
    - `group`: how many heads of queries share one of keys.
    """

    mesh: AbstractMesh | None
    axis: str
    size: int
    length: int
    group: int
    causal: bool
    scale: float


def on_blocks(ring: Ring, fn: Callable[..., Any], query: Array, *args: Array | None) -> Any:
    """Call a function on each device's blocks."""
    fn = ft.partial(fn, ring)
    if ring.size == 1:
        return fn(None, query, *args)
    spec = PartitionSpec(*[None] * (query.ndim - 3), ring.axis)
    specs = (spec,) * (1 + len(args))
    return run_per_device(fn, ring.mesh, ring.axis, specs, spec, query, *args)


def attend_ring(
    ring: Ring,
    rank: Array | None,
    attend_chunk: Callable[..., Any],
    queries: PyTree,
    query_sums: PyTree,
    keys: PyTree,
    key_sums: PyTree,
    segments: Int[Array, "*batch block"] | None,
) -> tuple[PyTree, PyTree]:
    """Attend to the blocks of all devices.

    - `attend_chunk`: called with chunks of the other arguments and a mask; returns the
      sums, with this pair of chunks added.
    - `queries`, `query_sums`: the arrays of the queries, and the sums over keys.
    - `keys`, `key_sums`: the arrays of the keys, and the sums over queries, which travel
      with their block and end up where they began.
    - `segments`: those of the block.
    """
    if segments is None:
        queries, keys = (queries, None), (keys, None)
    else:
        of_keys = to_chunks(segments[..., None, None])
        shape = (*of_keys.shape[:-2], ring.group, *of_keys.shape[-2:])
        of_queries = jnp.broadcast_to(jnp.expand_dims(of_keys, -3), shape)
        queries, keys = (queries, of_queries), (keys, of_keys)
    if rank is None:
        return _attend_block(ring, attend_chunk, 0, queries, query_sums, keys, key_sums)

    rotate = ft.partial(send_to_next, axis=ring.axis, size=ring.size)

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
    ring: Ring,
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

    def get_rows(tree: PyTree, i: Array) -> PyTree:
        chunk = get(tree, i)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1]), chunk)

    def put_rows(tree: PyTree, rows: PyTree, i: Array) -> PyTree:
        def to_group(x: Array) -> Array:
            return x.reshape(*x.shape[:-2], ring.group, size, x.shape[-1])

        return put(tree, jax.tree.map(to_group, rows), i)

    def make_mask(i: Array, j: Array) -> Array | None:
        """Which keys of chunk `j` the rows of chunk `i` see; `None` if all."""
        if not ring.causal and count * size == ring.length:
            return None
        shape = (ring.group, size, size)
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (1, 2))
        columns += j.astype(jnp.int32) * size
        seen = columns < ring.length
        if ring.causal:
            seen &= columns <= rows + (i.astype(jnp.int32) * size + distance)
        return seen.reshape(-1, size)

    def attend_row(i: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        query_sums, key_sums = state
        query_chunk, query_segments = get_rows(queries, i)

        def attend(j: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            chunk_sums, key_sums = state
            key_chunk, key_segments = get(keys, j)
            mask = make_mask(i, j)
            if query_segments is not None:
                same = query_segments == jnp.swapaxes(key_segments, -1, -2)
                mask = same if mask is None else jnp.broadcast_to(mask, same.shape) & same
            chunk_sums, key_chunk_sums = attend_chunk(
                query_chunk, chunk_sums, key_chunk, get(key_sums, j), mask
            )
            return chunk_sums, put(key_sums, key_chunk_sums, j)

        # The same on all devices in each step. Otherwise one of them could wait forever in
        # a collective that the compiler put here, and another never reaches.
        stop = jnp.where(distance == 0, i + 1, count) if ring.causal else count
        chunk_sums, key_sums = jax.lax.fori_loop(
            0, stop, attend, (get_rows(query_sums, i), key_sums)
        )
        return put_rows(query_sums, chunk_sums, i), key_sums

    return jax.lax.fori_loop(0, count, attend_row, (query_sums, key_sums))


def _count_chunks(length: int) -> tuple[int, int]:
    """The number of chunks in a block, and their size; the last may not be full."""
    count = -(-length // CHUNK)
    return count, -(-length // count)


def to_chunks(
    x: Float[Array, "*batch block heads dim"] | Int[Array, "*batch block heads dim"],
) -> Array:
    """Move the heads first, and pad the last chunk."""
    length = x.shape[-3]
    count, size = _count_chunks(length)
    widths = [(0, 0)] * (x.ndim - 2) + [(0, count * size - length), (0, 0)]
    return jnp.pad(jnp.swapaxes(x, -3, -2), widths)


def from_chunks(
    ring: Ring, x: Float[Array, "*batch heads padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `to_chunks`."""
    return jnp.swapaxes(x[..., : ring.length, :], -3, -2)


def to_groups(
    ring: Ring, x: Float[Array, "*batch block heads dim"]
) -> Float[Array, "*batch kv_heads group padded dim"]:
    x = to_chunks(x)
    return x.reshape(*x.shape[:-3], -1, ring.group, *x.shape[-2:])


def from_groups(
    ring: Ring, x: Float[Array, "*batch kv_heads group padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `to_groups`."""
    return from_chunks(ring, x.reshape(*x.shape[:-4], -1, *x.shape[-2:]))
