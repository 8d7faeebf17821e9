"""Windows: examples that are stretches of a text, wherever documents end."""

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

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
                raise ValueError(f"{name}={value} must be at least 1.")
        self.tokens = as_tokens(tokens)
        self.seq_len = seq_len
        if len(self.tokens) <= seq_len:
            raise ValueError(
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
        starts = self._starts(indices.astype(np.int64))
        found = self.tokens.take(starts[:, None] + np.arange(self.seq_len + 1))
        # Contiguous, as the devices want them.
        return {"tokens": found[:, :-1].copy(), "targets": found[:, 1:].copy()}

    def _starts(self, indices: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        if self._length < self._all:
            indices = indices * self._all // self._length
        return indices * self._stride
