"""The blocks of a sequence that go around a ring of devices.

Glossary:

- a *block* is the piece of a sequence that one device holds. In each *step* of the ring a
  device attends from its own block of queries to one block of keys and values, which
  comes from the device `source`; the first is its own;
- causal blocks are *balanced*: their second half is exchanged with the device that is as
  far from the other end. Of the 2n halves of a sequence, device i then holds 2i and 2n - 1
  - 2i, so that each has an early and a late one, and in each step the same work (Brandon
  et al. 2023, Striped Attention, https://arxiv.org/abs/2311.09431, balance the work by
  another layout). A half of a balanced block, or a whole other block, is a *part*;
- a *chunk* is a piece of a part. Attention is computed from one chunk to another at a time,
  so that no more scores exist than those between two chunks;
- a *group* is the queries of several heads that share a head of keys and values;
- inside, arrays of keys are `*batch kv_heads seq dim` and those of queries `*batch
  kv_heads group seq dim`; in a chunk of queries the group and the sequence are one dim,
  the *rows*, for products over the last two dims.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ._ring import Ring

#: The largest number of queries, and of keys, in a chunk.
CHUNK = 512


class Blocks(NamedTuple):
    """The static arguments of a call.

    - `ring`: the devices.
    - `length`: the length of a block.
    - `group`: how many heads of queries share one of keys.
    - `causal`, `window`, `scale`: as for [`eqxshard.parallel.ring_attention`][].
    """

    ring: Ring
    length: int
    group: int
    causal: bool
    window: int | None
    scale: float

    @property
    def balanced(self) -> bool:
        # With a window, blocks have equal work where they are.
        return self.causal and self.window is None and self.ring.size > 1

    @property
    def parts(self) -> int:
        return 2 if self.balanced else 1

    @property
    def part(self) -> int:
        """The length of a part; the second may be shorter by one."""
        return -(-self.length // self.parts)

    @property
    def chunks(self) -> tuple[int, int]:
        """The number of chunks in a part, and their size; the last may not be full."""
        count = -(-self.part // CHUNK)
        return count, -(-self.part // count)

    @property
    def steps(self) -> int:
        """How many blocks a device attends to."""
        if self.window is None:
            return self.ring.size
        return min(self.ring.size, 1 - (1 - self.window) // self.length)


class _Pairs(NamedTuple):
    """Pairs of a part of the queries and a part of the keys that it attends to.

    - `queries`, `keys`: the index of the part in its block, for each pair.
    - `distance`: how far the queries begin behind the keys, for the mask of causal
      attention; the length of a part or more if they see all keys.
    - `hidden`: whether the queries see none of the keys after all.
    """

    queries: Sequence[Any]
    keys: Sequence[Any]
    distance: Sequence[int]
    hidden: Any = False


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
      with their block. They are not sent back after the last step; see `send_back`.
    - `segments`: those of the block.
    """
    if segments is None:
        queries, keys = (queries, None), (keys, None)
    else:
        of_keys = to_chunks(blocks, segments[..., None, None])
        shape = (*of_keys.shape[:-2], blocks.group, *of_keys.shape[-2:])
        of_queries = jnp.broadcast_to(jnp.expand_dims(of_keys, -3), shape)
        queries, keys = (queries, of_queries), (keys, of_keys)

    def step(pairs: _Pairs, query_sums: PyTree, keys: PyTree, key_sums: PyTree) -> Any:
        return _attend_pairs(
            blocks, attend_chunk, pairs, queries, query_sums, keys, key_sums
        )

    if rank is None:
        return step(_pair_first(blocks, None), query_sums, keys, key_sums)
    ring, last = blocks.ring, blocks.steps - 1
    # Sent before they are used, so that the next block arrives while this one is in use.
    next_keys = ring.send(keys) if last else keys
    query_sums, key_sums = step(_pair_first(blocks, rank), query_sums, keys, key_sums)

    def body(carry: tuple[PyTree, ...], number: Any) -> tuple[tuple[PyTree, ...], None]:
        query_sums, keys, key_sums = carry
        next_keys, key_sums = ring.send(keys), ring.send(key_sums)
        pairs = _pair(blocks, rank, number)
        query_sums, key_sums = step(pairs, query_sums, keys, key_sums)
        return (query_sums, next_keys, key_sums), None

    if last == 0:
        return query_sums, key_sums
    carry = (query_sums, next_keys, key_sums)
    if blocks.window is not None:
        # There are few steps, and each has bounds of its own.
        for number in range(1, last):
            carry, _ = body(carry, number)
    else:
        # A loop, because an unrolled ring may hold all of its blocks at once.
        carry, _ = jax.lax.scan(body, carry, jnp.arange(1, last, dtype=jnp.int32))
    query_sums, keys, key_sums = carry
    return step(_pair(blocks, rank, last), query_sums, keys, ring.send(key_sums))


def _pair_first(blocks: Blocks, rank: Array | None) -> _Pairs:
    """The pairs of a device's own parts."""
    if not blocks.balanced:
        return _Pairs([0], [0], [0 if blocks.causal else blocks.part])
    _, early = _halves(blocks, rank)
    return _Pairs([0, 1, 1 - early], [0, 1, early], [0, 0, blocks.part])


def _pair(blocks: Blocks, rank: Array, step: Any) -> _Pairs:
    """The pairs with the parts of another device."""
    source = (rank - step) % blocks.ring.size
    if blocks.window is not None:
        # No position sees a block that comes around from the other end of the sequence.
        return _Pairs([0], [0], [step * blocks.length], hidden=rank < step)
    if not blocks.causal:
        return _Pairs([0], [0], [blocks.part])
    (first, early), (other, their_early) = (_halves(blocks, x) for x in (rank, source))
    behind = other < first
    # The late queries see the early keys. Besides, either the early queries see them, too,
    # or the late queries see the late keys.
    queries = [1 - early, jnp.where(behind, early, 1 - early)]
    keys = [their_early, jnp.where(behind, their_early, 1 - their_early)]
    return _Pairs(queries, keys, [blocks.part] * 2)


def _halves(blocks: Blocks, rank: Any) -> tuple[Array, Array]:
    """The number of a device's early half in the sequence, and which of its parts it is."""
    size = blocks.ring.size
    early = jnp.asarray(2 * rank >= size, jnp.int32)
    return jnp.where(early, 2 * (size - rank) - 1, 2 * rank), early


def _attend_pairs(
    blocks: Blocks,
    attend_chunk: Callable[..., Any],
    pairs: _Pairs,
    queries: PyTree,
    query_sums: PyTree,
    keys: PyTree,
    key_sums: PyTree,
) -> tuple[PyTree, PyTree]:
    """Attend from parts of this device's block to parts of one block, in chunks."""
    count, size = blocks.chunks
    all_seen = min(pairs.distance) >= blocks.part and blocks.window is None

    def get(tree: PyTree, i: Any) -> PyTree:
        slice_chunk = ft.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=-2)
        return jax.tree.map(lambda x: slice_chunk(x, i * size), tree)

    def put(tree: PyTree, chunk: PyTree, i: Any) -> PyTree:
        update = ft.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
        return jax.tree.map(lambda x, part: update(x, part, i * size), tree, chunk)

    def get_rows(tree: PyTree, i: Any) -> PyTree:
        chunk = get(tree, i)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1]), chunk)

    def put_rows(tree: PyTree, rows: PyTree, i: Any) -> PyTree:
        def to_group(x: Array) -> Array:
            return x.reshape(*x.shape[:-2], blocks.group, size, x.shape[-1])

        return put(tree, jax.tree.map(to_group, rows), i)

    def make_mask(part: Any, distance: Any, i: Array, j: Array) -> Array | None:
        """Which keys of chunk `j` the rows of chunk `i` see; `None` if all."""
        padded = blocks.parts * count * size != blocks.length
        if all_seen and not padded:
            return None
        shape = (blocks.group, size, size)
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (1, 2))
        columns += j.astype(jnp.int32) * size
        seen = columns < jnp.minimum(blocks.part, blocks.length - part * blocks.part)
        if not all_seen:
            rows += i.astype(jnp.int32) * size + distance
            seen &= columns <= rows
        if blocks.window is not None:
            seen &= (columns > rows - blocks.window) & ~jnp.asarray(pairs.hidden)
        return seen.reshape(-1, size)

    def attend_row(row: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        query_sums, key_sums = state
        part, distance = (_pick(x, row // count) for x in (pairs.keys, pairs.distance))
        i = row % count
        query_row = _pick(pairs.queries, row // count) * count + i
        query_chunk, query_segments = get_rows(queries, query_row)

        def attend(j: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            chunk_sums, key_sums = state
            key_row = part * count + j
            key_chunk, key_segments = get(keys, key_row)
            mask = make_mask(part, distance, i, j)
            if query_segments is not None:
                same = query_segments == jnp.swapaxes(key_segments, -1, -2)
                mask = same if mask is None else jnp.broadcast_to(mask, same.shape) & same
            chunk_sums, key_chunk_sums = attend_chunk(
                query_chunk, chunk_sums, key_chunk, get(key_sums, key_row), mask
            )
            return chunk_sums, put(key_sums, key_chunk_sums, key_row)

        # The bounds are the same on all devices in each step. Otherwise one of them could
        # wait forever in a collective of the compiler's that another never reaches.
        start, stop = 0, count
        if not all_seen:
            stop = jnp.minimum((i * size + size - 1 + distance) // size + 1, count)
        if blocks.window is not None:
            start = jnp.maximum((i * size + distance - blocks.window + 1) // size, 0)
        chunk_sums, key_sums = jax.lax.fori_loop(
            start, stop, attend, (get_rows(query_sums, query_row), key_sums)
        )
        return put_rows(query_sums, chunk_sums, query_row), key_sums

    rows = len(pairs.queries) * count
    return jax.lax.fori_loop(0, rows, attend_row, (query_sums, key_sums))


def _pick(values: Sequence[Any], i: Any) -> Any:
    if len(values) == 1:
        return values[0]
    return jnp.stack([jnp.asarray(value, jnp.int32) for value in values])[i]


def balance(blocks: Blocks, tree: PyTree) -> PyTree:
    """Exchange the second halves of blocks to be balanced. A second call undoes this."""
    return _send_halves(blocks, tree, lambda i: i)


def send_back(blocks: Blocks, tree: PyTree) -> PyTree:
    """Send what travelled with the keys to where they began, and undo `balance`."""
    if blocks.ring.size == 1:
        return tree
    return _send_halves(blocks, tree, lambda i: (i + 1 - blocks.steps) % blocks.ring.size)


def _send_halves(blocks: Blocks, tree: PyTree, to: Callable[[int], int]) -> PyTree:
    ring = blocks.ring
    if not blocks.balanced:
        return ring.permute(tree, to)

    def send(x: Array) -> Array:
        first, second = jnp.split(x, [blocks.part], axis=-3)
        second = ring.permute(second, lambda i: ring.size - 1 - to(i))
        return jnp.concatenate([ring.permute(first, to), second], axis=-3)

    return jax.tree.map(send, tree)


def to_chunks(
    blocks: Blocks,
    x: Float[Array, "*batch block heads dim"] | Int[Array, "*batch block heads dim"],
) -> Array:
    """Move the heads before the sequence, and pad the last chunk of each part."""
    (count, size), parts = blocks.chunks, blocks.parts

    def pad(x: Array, length: int) -> Array:
        widths = [(0, 0)] * (x.ndim - 2) + [(0, length - x.shape[-2]), (0, 0)]
        return jnp.pad(x, widths)

    x = pad(jnp.swapaxes(x, -3, -2), parts * blocks.part)
    x = pad(x.reshape(*x.shape[:-2], parts, blocks.part, x.shape[-1]), count * size)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def from_chunks(
    blocks: Blocks, x: Float[Array, "*batch heads padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `to_chunks`."""
    x = x.reshape(*x.shape[:-2], blocks.parts, -1, x.shape[-1])[..., : blocks.part, :]
    x = x.reshape(*x.shape[:-3], -1, x.shape[-1])
    return jnp.swapaxes(x[..., : blocks.length, :], -3, -2)


def to_groups(
    blocks: Blocks, x: Float[Array, "*batch block heads dim"]
) -> Float[Array, "*batch kv_heads group padded dim"]:
    """As `to_chunks`, with the heads in groups that share a head of keys."""
    x = to_chunks(blocks, x)
    return x.reshape(*x.shape[:-3], -1, blocks.group, *x.shape[-2:])


def from_groups(
    blocks: Blocks, x: Float[Array, "*batch kv_heads group padded dim"]
) -> Float[Array, "*batch block heads dim"]:
    """The inverse of `to_groups`."""
    return from_chunks(blocks, x.reshape(*x.shape[:-4], -1, *x.shape[-2:]))
