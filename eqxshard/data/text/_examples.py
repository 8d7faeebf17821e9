"""Examples of text: windows, wherever documents end, and packed documents.

Glossary of packing:

- a *piece* is a document, or a part of one that is longer than `seq_len` tokens;
- a *bin* is an example: the pieces in it, one after another.
"""

from bisect import bisect_left, insort

import numpy as np
from jaxtyping import Int, Int64
from numpy.typing import ArrayLike

from ..._errors import UsageError
from ...sharding._batch_weights import WEIGHT
from ._tokens import Tokens, as_tokens


class Windows:
    """A source whose examples are `seq_len` tokens in a row, and the token after each.

    By default every offset is an example, so examples overlap. Train on these with an
    [`eqxshard.data.UniformSampler`][], as an epoch of all of them would be `seq_len` times
    the text. With `stride=seq_len` no token is a target twice, which is how to evaluate.
    All are targets but the first one and, at the end, those that do not fill an example.

    An example has `"tokens"` and `"targets"`, int32 of shape `(seq_len,)`.

    **Arguments:**

    - `tokens`: the [`eqxshard.data.text.Tokens`][], or an array of them.
    - `seq_len`: the number of tokens of an example.
    - `stride`: how far apart examples start.
    - `limit`: the number of examples to keep at most, spread evenly over the text.

    **Raises:**

    `ValueError` if a number is not positive, or there are too few tokens for one example.

    !!! Example

        ```python
        train = eqxshard.data.text.Windows(corpus.train, seq_len=256)
        valid = eqxshard.data.text.Windows(corpus.valid, seq_len=256, stride=256)
        ```
    """

    def __init__(
        self,
        tokens: Tokens | ArrayLike,
        seq_len: int,
        *,
        stride: int = 1,
        limit: int | None = None,
    ):
        for name, value in {"seq_len": seq_len, "stride": stride, "limit": limit}.items():
            if value is not None and value < 1:
                raise UsageError(f"{name}={value} must be at least 1.")
        self.tokens = as_tokens(tokens)
        self.seq_len = seq_len
        if len(self.tokens) <= seq_len:
            raise UsageError(
                f"the text has {len(self.tokens):,} tokens, and seq_len={seq_len:,} needs "
                f"{seq_len + 1:,}; use a smaller seq_len, or a longer text."
            )
        self._stride = stride
        self._all = (len(self.tokens) - seq_len - 1) // stride + 1
        self._length = self._all if limit is None else min(limit, self._all)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        indices = indices.astype(np.int64)
        if self._length < self._all:
            indices = indices * self._all // self._length
        starts = indices * self._stride
        found = self.tokens.take(starts[:, None] + np.arange(self.seq_len + 1))
        return {"tokens": found[:, :-1], "targets": found[:, 1:]}


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
            raise UsageError(f"seq_len={seq_len} must be at least 1.")
        self.tokens = as_tokens(tokens)
        self.seq_len = seq_len
        starts, lengths = _cut(self.tokens.ends(), seq_len)
        if not len(starts):
            raise UsageError(
                f"the text has {len(self.tokens):,} tokens and no document of two or more, "
                "so nothing can be predicted; give a longer text."
            )
        bins = _best_fit(lengths, seq_len)
        # The pieces by bin; in a bin, in the order of the text.
        order = np.argsort(bins, kind="stable")
        self._starts, self._lengths = starts[order], lengths[order]
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
        lengths = self._lengths[pieces]
        # For each token: its position in its piece, and its place in the arrays.
        positions = _counted(lengths)
        row = np.repeat(rows, lengths)
        totals = np.bincount(row, minlength=len(indices))
        places = row * self.seq_len + _counted(totals)
        sources = np.repeat(self._starts[pieces], lengths) + positions
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


def _cut(
    ends: Int64[np.ndarray, " documents"], seq_len: int
) -> tuple[Int64[np.ndarray, " pieces"], Int64[np.ndarray, " pieces"]]:
    """The starts and lengths of all pieces, in the order of the text.

    Each has at least one token that has a target.
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    # The last token of a document has no target.
    lengths = np.maximum(ends - starts - 1, 0)
    counts = -(-lengths // seq_len)
    before = _counted(counts) * seq_len
    whole = np.repeat(lengths, counts)
    return np.repeat(starts, counts) + before, np.minimum(whole - before, seq_len)


def _best_fit(
    lengths: Int64[np.ndarray, " pieces"], seq_len: int
) -> Int64[np.ndarray, " pieces"]:
    """The bin of each piece: the longest first, each where the least space is left."""
    bins = np.empty(len(lengths), np.int64)
    # The bins by the space that is left in them, and the sizes of these spaces in order.
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []
    made = 0
    order = np.argsort(-lengths, kind="stable")
    for piece, size in zip(order.tolist(), lengths[order].tolist()):
        at = bisect_left(spaces, size)
        if at == len(spaces):
            # None has enough.
            chosen, space = made, seq_len
            made += 1
        else:
            space = spaces[at]
            chosen = by_space[space].pop()
            if not by_space[space]:
                del spaces[at]
        bins[piece] = chosen
        left = space - size
        if left:
            if not by_space.get(left):
                by_space[left] = []
                insort(spaces, left)
            by_space[left].append(chosen)
    return bins


def _counted(counts: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " total"]:
    """0 to count - 1 for each count, one after another."""
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(starts, counts)
