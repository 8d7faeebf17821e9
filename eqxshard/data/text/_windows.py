"""`Windows`: examples of text, all tokens in a row, with documents kept apart or not."""

import numpy as np
from jaxtyping import Bool, Int, Int64
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

    With `documents=True`, the documents in an example do not see each other. The example
    also has, int32 of shape `(seq_len,)`:

    - `"segments"`: 1 for the first document in the window, 2 for the next, and so on, for
        [`eqxshard.nn.attention`][];
    - `"positions"`: from 0 where a document starts, or where the window starts within one;

    and `"__weight__"`, the number of its targets, by which steps average over targets. The
    target of a document's last token is -1, since another document follows. A document
    that does not end in a window goes on in the next.

    **Arguments:**

    - `tokens`: the [`eqxshard.data.text.Tokens`][], or an array of them.
    - `seq_len`: the number of tokens of an example.
    - `stride`: how many tokens apart examples start.
    - `limit`: the most examples to have, spread evenly over the text.
    - `documents`: whether to keep the documents of an example apart.

    **Raises:**

    `ValueError` if a number is not positive, or there are too few tokens for one example,
    or with `documents=True` every document is a single token.

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
        documents: bool = False,
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
        if documents and len(self.tokens.ends()) == len(self.tokens):
            raise UsageError(
                f"each of the {len(self.tokens):,} documents is a single token, so nothing "
                "can be predicted; give longer documents, or leave out documents=True."
            )
        self._stride = stride
        self._all = (len(self.tokens) - seq_len - 1) // stride + 1
        self._length = self._all if limit is None else min(limit, self._all)
        self._documents = documents

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        indices = indices.astype(np.int64)
        if self._length < self._all:
            indices = indices * self._all // self._length
        starts = indices * self._stride
        found = self.tokens.take(starts[:, None] + np.arange(self.seq_len + 1))
        tokens, targets = found[:, :-1], found[:, 1:]
        if not self._documents:
            return {"tokens": tokens, "targets": targets}
        begins = self._begins(starts)
        places = np.arange(self.seq_len, dtype=np.int32)
        first = np.maximum.accumulate(np.where(begins[:, :-1], places, 0), axis=1)
        return {
            "tokens": tokens,
            "targets": np.where(begins[:, 1:], np.int32(-1), targets),
            "segments": 1 + np.cumsum(begins[:, :-1], axis=1, dtype=np.int32),
            "positions": places - first,
            WEIGHT: np.asarray(np.sum(~begins[:, 1:], axis=1), np.float32),
        }

    def _begins(self, starts: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, "n tokens"]:
        """Where documents begin: for each window, at each place after its first token.

        The last place is that of the token after the window.
        """
        ends = self.tokens.ends()
        low = np.searchsorted(ends, starts, side="right")
        counts = np.searchsorted(ends, starts + self.seq_len, side="right") - low
        rows = np.repeat(np.arange(len(starts)), counts)
        # For each window, the indices of the ends in it, from `low` on.
        numbers = np.arange(len(rows)) + np.repeat(low - np.cumsum(counts) + counts, counts)
        begins = np.zeros((len(starts), self.seq_len + 1), np.bool_)
        begins[rows, ends[numbers] - starts[rows]] = True
        return begins
