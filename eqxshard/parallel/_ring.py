"""Rings of devices, and the blocks of a sequence that go around one.

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

from ..sharding._spec import check_axis
from ..sharding._text import nearest_multiples

#: The largest number of queries, and of keys, in a chunk.
CHUNK = 512


class Ring(NamedTuple):
    """The devices along a mesh axis; the other axes are left to the compiler.

    - `mesh`: to split arrays over; `None` if they are whole, or split already.
    - `axis`, `size`: the mesh axis of the ring, and its number of devices.
    """

    mesh: AbstractMesh | None
    axis: str
    size: int

    def run(
        self,
        fn: Callable[..., Any],
        in_specs: tuple[PartitionSpec, ...],
        out_specs: Any,
        *args: Any,
    ) -> Any:
        """Call `fn(rank, *args)` on each device's parts; one device has the rank `None`."""
        if self.size == 1:
            return fn(None, *args)
        if self.mesh is None:
            return fn(jax.lax.axis_index(self.axis), *args)
        # The ranks are passed in, because JAX 0.10.1 cannot lower an axis_index in
        # per-device code that is inside other per-device code.
        return jax.shard_map(
            lambda ranks, *args: fn(ranks[0], *args),
            mesh=self.mesh,
            in_specs=(PartitionSpec(self.axis), *in_specs),
            out_specs=out_specs,
            axis_names={self.axis},
        )(jnp.arange(self.size, dtype=jnp.int32), *args)

    def send(self, tree: PyTree) -> PyTree:
        """Send arrays to the next device; return those of the one before."""
        ahead = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, ahead), tree)

    def check_divides(self, count: int, what: str) -> None:
        """Raise `ValueError` unless a number of rows, say, does."""
        if count % self.size:
            raise ValueError(
                f"the {count} {what} do not divide over {self.axis}={self.size}; use a "
                f"multiple of {self.size}, such as {nearest_multiples(count, self.size)}."
            )


def find_ring(name: str, axis: str) -> Ring:
    """The ring of an axis of the mesh in context, of size 1 if there is no mesh.

    **Raises:**

    `ValueError` if the mesh has no such axis.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return Ring(None, axis, 1)
    check_axis(axis, mesh, name)
    size = mesh.shape.get(axis, 1)
    return Ring(None if size == 1 or axis in mesh.manual_axes else mesh, axis, size)


class Blocks(NamedTuple):
    """The static arguments of a call.

    - `ring`: the devices.
    - `length`: the length of a block.
    - `group`: how many heads of queries share one of keys.
    """

    ring: Ring
    length: int
    group: int
    causal: bool
    scale: float


def attend_ring(
    blocks: Blocks,
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
        shape = (*of_keys.shape[:-2], blocks.group, *of_keys.shape[-2:])
        of_queries = jnp.broadcast_to(jnp.expand_dims(of_keys, -3), shape)
        queries, keys = (queries, of_queries), (keys, of_keys)

    def step(distance: Any, query_sums: PyTree, keys: PyTree, key_sums: PyTree) -> Any:
        return _attend_block(
            blocks, attend_chunk, distance, queries, query_sums, keys, key_sums
        )

    if rank is None:
        return step(0, query_sums, keys, key_sums)
    ring = blocks.ring

    def distance(number: Any) -> Array:
        """From the block that arrives in a step to this device's own."""
        return (rank - (rank - number) % ring.size) * blocks.length

    def body(carry: tuple[PyTree, ...], number: Array) -> tuple[tuple[PyTree, ...], None]:
        query_sums, keys, key_sums = carry
        # Sent before it is used, so that the next block arrives while this one is.
        next_keys = ring.send(keys)
        query_sums, key_sums = step(distance(number), query_sums, keys, key_sums)
        return (query_sums, next_keys, ring.send(key_sums)), None

    # A loop, because an unrolled ring may hold all of its blocks at once.
    numbers = jnp.arange(ring.size - 1, dtype=jnp.int32)
    carry, _ = jax.lax.scan(body, (query_sums, keys, key_sums), numbers)
    query_sums, key_sums = step(distance(ring.size - 1), *carry)
    return query_sums, ring.send(key_sums)


def _attend_block(
    blocks: Blocks,
    attend_chunk: Callable[..., Any],
    distance: Any,
    queries: PyTree,
    query_sums: PyTree,
    keys: PyTree,
    key_sums: PyTree,
) -> tuple[PyTree, PyTree]:
    """Attend to a block that begins `distance` before this device's own, in chunks."""
    count, size = _count_chunks(blocks.length)

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
            return x.reshape(*x.shape[:-2], blocks.group, size, x.shape[-1])

        return put(tree, jax.tree.map(to_group, rows), i)

    def make_mask(i: Array, j: Array) -> Array | None:
        """Which keys of chunk `j` the rows of chunk `i` see; `None` if all."""
        if not blocks.causal and count * size == blocks.length:
            return None
        shape = (blocks.group, size, size)
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (1, 2))
        columns += j.astype(jnp.int32) * size
        seen = columns < blocks.length
        if blocks.causal:
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
        stop = jnp.where(distance == 0, i + 1, count) if blocks.causal else count
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
    blocks: Blocks, x: Float[Array, "*batch heads padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `to_chunks`."""
    return jnp.swapaxes(x[..., : blocks.length, :], -3, -2)


def to_groups(
    blocks: Blocks, x: Float[Array, "*batch block heads dim"]
) -> Float[Array, "*batch kv_heads group padded dim"]:
    x = to_chunks(x)
    return x.reshape(*x.shape[:-3], -1, blocks.group, *x.shape[-2:])


def from_groups(
    blocks: Blocks, x: Float[Array, "*batch kv_heads group padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `to_groups`."""
    return from_chunks(blocks, x.reshape(*x.shape[:-4], -1, *x.shape[-2:]))
