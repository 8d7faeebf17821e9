"""Windows: examples that are stretches of a text, wherever documents end."""

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from ._tokens import Tokens, as_tokens


class Windows:
    """A source whose examples are `block` tokens in a row, and the tokens that follow each.

    By default every offset is an example, so examples overlap. Train on these with an
    [`eqxshard.data.UniformSampler`][], as an epoch of all of them would be `block` times
    the text. With `stride=block` no token is a target twice, which is how to evaluate. All
    are targets but the first one and, at the end, those that do not fill a block.

    An example has `"tokens"` and `"targets"`, int32 of shape `(block,)`.

    **Arguments:**

    - `tokens`: the [`eqxshard.data.text.Tokens`][], or an array of them.
    - `block`: the number of tokens of an example.
    - `stride`: how far apart examples start.
    - `limit`: the number of examples to keep at most, spread evenly over the text.

    **Raises:**

    `ValueError` if a number is not positive, or there are too few tokens for one example.

    !!! Example

        ```python
        train = eqxshard.data.text.Windows(corpus.train, block=256)
        valid = eqxshard.data.text.Windows(corpus.valid, block=256, stride=256)
        ```
    """

    def __init__(
        self,
        tokens: Tokens | ArrayLike,
        block: int,
        *,
        stride: int = 1,
        limit: int | None = None,
    ):
        for name, value in {"block": block, "stride": stride, "limit": limit}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.tokens = as_tokens(tokens)
        self.block = block
        if len(self.tokens) <= block:
            raise ValueError(
                f"the text has {len(self.tokens):,} tokens, and a block of {block:,} needs "
                f"{block + 1:,}; use a smaller block or a longer text."
            )
        self._stride = stride
        self._all = (len(self.tokens) - block - 1) // stride + 1
        self._length = self._all if limit is None else min(limit, self._all)

    @property
    def vocab(self) -> int:
        """The number of different tokens."""
        return self.tokens.vocab

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        starts = self._starts(indices.astype(np.int64))
        found = self.tokens.take(starts[:, None] + np.arange(self.block + 1))
        # Contiguous, as the devices want them.
        return {"tokens": found[:, :-1].copy(), "targets": found[:, 1:].copy()}

    def _starts(self, indices: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        if self._length < self._all:
            indices = indices * self._all // self._length
        return indices * self._stride
