"""Packing: examples that hold several documents, which know nothing of each other.

Glossary:

- a *piece* is a document, or a part of one that is longer than `seq_len` tokens;
- a *bin* is an example: the pieces in it, one after another.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64
from numpy.typing import ArrayLike

from .._weights import WEIGHT
from ._tokens import Tokens, as_tokens


class _Pieces(NamedTuple):
    """All pieces of a text, each of at least one token that has a target."""

    starts: Int64[np.ndarray, " pieces"]
    lengths: Int64[np.ndarray, " pieces"]


class PackedDocuments:
    """A source whose examples hold whole documents, as many as fit into `seq_len` tokens.

    A document of more than `seq_len` tokens is cut into pieces of that length and a shorter
    one. Pieces go where the least space is left (best fit, the longest first), so little is
    left empty. Every token but the last of each document is in one example, with the
    token that follows it as its target.

    An example has, int32 of shape `(seq_len,)`:

    - `"tokens"`: those of its pieces, then 0;
    - `"targets"`: the token that follows each in its document, -1 for padding;
    - `"segments"`: 1 for the first piece, 2 for the next, and so on, 0 for padding;
    - `"positions"`: from 0 in each piece;

    and `"__weight__"`, the number of its targets, by which steps average over targets.

    **Arguments:**

    - `tokens`: the [`eqxshard.data.text.Tokens`][], or an array of them.
    - `seq_len`: the number of tokens of an example.

    **Raises:**

    `ValueError` if `seq_len` is not positive, or no document has two tokens.

    !!! Example

        ```python
        train = eqxshard.data.text.PackedDocuments(corpus.train, seq_len=1024)
        loader = eqxshard.Loader(train, batch_size=64, mesh=mesh)
        ```
    """

    def __init__(self, tokens: Tokens | ArrayLike, seq_len: int):
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1.")
        self.tokens = as_tokens(tokens)
        self.seq_len = seq_len
        pieces = _cut(self.tokens.ends(), seq_len)
        if not len(pieces.starts):
            raise ValueError(
                f"the text has {len(self.tokens):,} tokens and no document of two or more, "
                "so nothing can be predicted; give a longer text."
            )
        bins = _best_fit(pieces.lengths, seq_len)
        # The pieces by bin; in a bin, in the order of the text.
        order = np.argsort(bins, kind="stable")
        self._pieces = _Pieces(pieces.starts[order], pieces.lengths[order])
        #: The first piece of each bin, and where there is one more.
        self._firsts = np.searchsorted(bins[order], np.arange(bins.max() + 2))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        shape = (len(indices), self.seq_len)
        counts = self._firsts[indices + 1] - self._firsts[indices]
        # For each piece: its number, the example it is in and its segment there.
        rows = np.repeat(np.arange(len(indices)), counts)
        within = _counted(counts)
        pieces = self._firsts[indices][rows] + within
        lengths = self._pieces.lengths[pieces]
        # For each token: its position in its piece, and its place in the arrays.
        positions = _counted(lengths)
        row = np.repeat(rows, lengths)
        totals = np.bincount(row, minlength=len(indices))
        places = row * self.seq_len + _counted(totals)
        sources = np.repeat(self._pieces.starts[pieces], lengths) + positions
        found = self.tokens.take(np.stack([sources, sources + 1]))

        def spread(values: np.ndarray, padding: int) -> np.ndarray:
            array = np.full(shape, padding, np.int32)
            array.reshape(-1)[places] = values
            return array

        return {
            "tokens": spread(found[0], 0),
            "targets": spread(found[1], -1),
            "segments": spread(np.repeat(within + 1, lengths), 0),
            "positions": spread(positions, 0),
            WEIGHT: totals.astype(np.float32),
        }


def _cut(ends: Int64[np.ndarray, " documents"], seq_len: int) -> _Pieces:
    """The pieces of the documents that end there, in the order of the text."""
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    # The last token of a document has no target.
    lengths = np.maximum(ends - starts - 1, 0)
    counts = -(-lengths // seq_len)
    before = _counted(counts) * seq_len
    whole = np.repeat(lengths, counts)
    return _Pieces(np.repeat(starts, counts) + before, np.minimum(whole - before, seq_len))


def _best_fit(
    lengths: Int64[np.ndarray, " pieces"], seq_len: int
) -> Int64[np.ndarray, " pieces"]:
    """The bin of each piece: the longest first, each where the least space is left.

    Pieces of one length are placed together, in the order of the text, one in each of the
    bins with the same space left (Ding et al., 2024, arXiv:2404.10830).
    """
    bins = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    parts = np.split(order, firsts[1:])
    # The bins by the space that is left in them, and these sizes in order.
    by_space: dict[int, list[np.ndarray]] = {}
    spaces: list[int] = []
    made = 0

    def put(chosen: np.ndarray, space: int) -> None:
        if not space or not len(chosen):
            return
        if space not in by_space:
            insort(spaces, space)
            by_space[space] = []
        by_space[space].append(chosen)

    for size, left in zip((-sizes).tolist(), parts):
        while len(left):
            at = bisect_left(spaces, size)
            if at == len(spaces):
                # None has enough: new ones, each for as many of this size as fit.
                each = min(seq_len // size, len(left))
                new = made + np.arange(-(-len(left) // each))
                made += len(new)
                bins[left] = np.repeat(new, each)[: len(left)]
                last = len(left) - each * (len(new) - 1)
                put(new[:-1], seq_len - each * size)
                put(new[-1:], seq_len - last * size)
                break
            space = spaces.pop(at)
            there = np.concatenate(by_space.pop(space))
            chosen = there[: len(left)]
            bins[left[: len(chosen)]] = chosen
            left = left[len(chosen) :]
            put(chosen, space - size)
            if len(chosen) < len(there):
                put(there[len(chosen) :], space)
    return bins


def _counted(counts: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " total"]:
    """0 to count - 1 for each count, one after another."""
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)
