"""Batches of examples of similar length, padded to one of a few lengths."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from .._errors import UsageError


class Span(NamedTuple):
    """The places of a batch in the order of its epoch.

    - `epoch`, `start`, `stop`: the epoch, and the range of its places.
    - `length`: what the batch is padded to, if its sampler pads.
    """

    epoch: int
    start: int
    stop: int
    length: int | None = None


class BucketBatch(dict[str, Any]):
    """A batch that is padded to a length: a dict, of which steps expect several shapes."""

    def __init__(self, entries: Mapping[str, Any], length: int):
        super().__init__(entries)
        self.length = length


def _flatten(batch: BucketBatch) -> tuple[list[Any], tuple[tuple[str, ...], int]]:
    names = tuple(sorted(batch))
    return [batch[name] for name in names], (names, batch.length)


def _flatten_with_keys(batch: BucketBatch) -> tuple[list[Any], Any]:
    entries, (names, length) = _flatten(batch)
    return [*zip(map(jax.tree_util.DictKey, names), entries)], (names, length)


jax.tree_util.register_pytree_with_keys(
    BucketBatch,
    _flatten_with_keys,
    lambda of, entries: BucketBatch(dict(zip(of[0], entries)), of[1]),
    _flatten,
)


class Buckets:
    """A sampler that makes each batch of examples of similar length.

    Lengths are divided into buckets by `boundaries`. All examples of a batch are of one
    bucket, and are padded to its boundary, so batches come in a few shapes, and a step
    compiles once for each of them. Each example comes once in an epoch; the last batch of
    each bucket is filled up or left out, as the loader's `remainder` says. Which examples
    make up which batch, and the order of the batches, is random, and a function of the
    seed, the epoch and the batch size.

    Entries that are padded may be ragged: the source's `gather` may return a list of arrays
    of different first dims for them, as an [`eqxshard.data.RecordSource`][] does; or an
    array that is padded already, which is cut.

    **Arguments:**

    - `lengths`: the length of each example of the source.
    - `boundaries`: the lengths to pad to, in ascending order; the last one is at least
        that of the longest example.
    - `pad`: for each entry that has this length as its first dim (after that of the
        examples), the value to pad it with.

    **Raises:**

    `ValueError` if `lengths` or `boundaries` is not a vector of integers as above, an
    example is longer than the last boundary, or `pad` is empty. The loader raises
    `ValueError` if its source has another number of examples, and while iterating, if an
    example is longer than `lengths` says, or lacks an entry.

    !!! Example

        ```python
        buckets = eqxshard.data.Buckets(
            lengths, boundaries=(128, 256, 512), pad={"tokens": 0, "targets": -1}
        )
        loader = eqxshard.Loader(source, batch_size=64, mesh=mesh, sampler=buckets)
        ```
    """

    def __init__(
        self, lengths: ArrayLike, boundaries: Sequence[int], pad: Mapping[str, Any]
    ):
        found, bounds = np.asarray(lengths), np.asarray(boundaries)
        for name, array in (("lengths", found), ("boundaries", bounds)):
            if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
                raise UsageError(
                    f"{name} is {array.dtype} of shape {array.shape}; give integers."
                )
        if bounds[0] < 1 or np.any(np.diff(bounds) <= 0) or found.min() < 0:
            raise UsageError(
                f"the boundaries {bounds.tolist()} must ascend from at least 1, and no "
                f"length be negative (the least is {found.min()}); give others."
            )
        if found.max() > bounds[-1]:
            raise UsageError(
                f"example {found.argmax()} has the length {found.max()}, and the last "
                f"boundary is {bounds[-1]}; crop the examples, or add a boundary."
            )
        if not pad:
            raise UsageError(
                "pad is empty; give the entries to pad, and with what, such as "
                "{'tokens': 0}."
            )
        #: The lengths that batches are padded to.
        self.boundaries: list[int] = bounds.tolist()
        self._bucket = np.searchsorted(bounds, found).astype(np.int32)
        self._counts = np.bincount(self._bucket, minlength=len(bounds))
        self._pad = dict(pad)

    def __len__(self) -> int:
        return len(self._bucket)

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, bucket by bucket; see [`eqxshard.data.Sampler`][]."""
        if examples != len(self):
            raise UsageError(
                f"the buckets are of {len(self):,} lengths, and the source has "
                f"{examples:,} examples; give one length for each example."
            )
        shuffled = np.random.RandomState([seed, epoch]).permutation(examples)
        return shuffled[np.argsort(self._bucket[shuffled], kind="stable")]

    def left_over(self, batch_size: int) -> Int[np.ndarray, " buckets"]:
        """The number of examples of each bucket that fill no batch."""
        return self._counts % batch_size

    def batches(self, batch_size: int, *, fills: bool) -> int:
        """The number of batches in an epoch."""
        return int(sum(self._counts_of_batches(batch_size, fills)))

    def span(
        self, seed: int, epoch: int, number: int, batch_size: int, *, fills: bool
    ) -> Span:
        """The places of one of the batches of an epoch."""
        found = _plan(self, seed, epoch, batch_size, fills)
        start, stop, length = (int(each[number]) for each in found)
        return Span(epoch, start, stop, length)

    def pad(self, arrays: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
        """Some examples, each entry of which is padded to a length that has it."""
        for name in self._pad:
            if name not in arrays:
                raise UsageError(
                    f"the buckets pad {name!r}, and the examples have {sorted(arrays)}; "
                    "give pad= the entries of the source."
                )
        return arrays | {
            name: _padded(name, arrays[name], length, value)
            for name, value in self._pad.items()
        }

    def _counts_of_batches(self, size: int, fills: bool) -> Int[np.ndarray, " buckets"]:
        return -(-self._counts // size) if fills else self._counts // size


@functools.lru_cache(maxsize=2)
def _plan(buckets: Buckets, seed: int, epoch: int, size: int, fills: bool) -> list[Any]:
    """Where each batch of an epoch starts and stops, and its length, in random order."""
    counts = buckets._counts_of_batches(size, fills)
    ends = np.cumsum(buckets._counts)
    which = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (ends - buckets._counts)[which] + within * size
    stops = np.minimum(starts + size, ends[which])
    lengths = np.asarray(buckets.boundaries)[which]
    # Another stream than that of the rows.
    order = np.random.RandomState([seed, epoch, 1]).permutation(len(which))
    return [each[order] for each in (starts, stops, lengths)]


def _padded(name: str, rows: np.ndarray, length: int, value: Any) -> np.ndarray:
    """Rows of an entry, all of one length."""
    if rows.dtype != object:
        if rows.ndim < 2:
            raise UsageError(
                f"the buckets pad {name!r}, which has one number per example; leave it "
                "out of pad=."
            )
        if rows.shape[1] >= length:
            return np.ascontiguousarray(rows[:, :length])
    first = np.asarray(rows[0])
    padded = np.full((len(rows), length, *first.shape[1:]), value, first.dtype)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise UsageError(
                f"{name!r} has an example of length {len(row)} in the bucket of length "
                f"{length}; give Buckets the lengths of the examples."
            )
        padded[i, : len(row)] = row
    return padded


def stack_rows(rows: list[Any]) -> np.ndarray:
    """Rows as an array; as an array of objects, if they are of different shapes."""
    if len({np.shape(row) for row in rows}) <= 1:
        return np.asarray(rows)
    ragged = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        ragged[i] = np.asarray(row)
    return ragged
