"""Tokens behind one index space: in memory, or a part of others."""

import operator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64
from numpy.typing import ArrayLike


@runtime_checkable
class Tokens(Protocol):
    """Many tokens in a row, such as those of a text."""

    @property
    def vocab_size(self) -> int:
        """The number of different tokens; each is at least 0 and less than this."""
        ...

    def __len__(self) -> int:
        """The number of tokens."""
        ...

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape.

        **Arguments:**

        - `indices`: each at least 0 and less than the length.
        """
        ...

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        ...


class TokenArray:
    """Tokens in memory.

    **Arguments:**

    - `tokens`: integers, one after another.
    - `vocab_size`: the number of different tokens; by default, one more than the largest.
    - `ends`: where each document ends, in order; by default they are one document.

    **Raises:**

    `ValueError` if the tokens are not a vector of integers, or are not all less than
    `vocab_size`, or `ends` does not increase up to their number.

    !!! Example

        ```python
        tokens = eqxshard.data.text.TokenArray(tokenizer.encode(text), vocab_size=65)
        ```
    """

    def __init__(
        self,
        tokens: ArrayLike,
        *,
        vocab_size: int | None = None,
        ends: ArrayLike | None = None,
    ):
        found = np.asarray(tokens)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(
                f"the tokens are {found.dtype} of shape {found.shape}; give one row of "
                "integers."
            )
        low, high = int(found.min(initial=0)), int(found.max(initial=0))
        self.vocab_size = high + 1 if vocab_size is None else vocab_size
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"there is a token {low if low < 0 else high}, and the vocabulary has "
                f"{self.vocab_size}; give tokens from 0 to {self.vocab_size - 1}."
            )
        self._tokens = found
        self._ends = np.asarray([len(found)] if ends is None else ends, np.int64)
        steps = np.diff(self._ends, prepend=0)
        if len(found) and (np.any(steps <= 0) or self._ends[-1:].tolist() != [len(found)]):
            raise ValueError(
                "ends must increase up to the number of tokens; give the index after the "
                "last token of each document."
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape."""
        return self._tokens[indices].astype(np.int32)

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        return self._ends


class TokenRange:
    """A part of other tokens, such as the first 90 %.

    A document that the range cuts is shorter in it.

    **Arguments:**

    - `tokens`: the [`eqxshard.data.text.Tokens`][] to take a part of.
    - `start`: the index of the first token.
    - `stop`: the index after the last one.

    **Raises:**

    `ValueError` if it is not within the tokens.

    !!! Example

        ```python
        tokens = eqxshard.data.text.TokenFiles("prepared")
        train = eqxshard.data.text.TokenRange(tokens, 0, len(tokens) * 9 // 10)
        ```
    """

    def __init__(self, tokens: Tokens, start: int, stop: int):
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= len(tokens):
            raise ValueError(
                f"tokens {start:,} to {stop:,} are not within {len(tokens):,} tokens; give "
                "a range that is."
            )
        self._tokens = tokens
        self._start = start
        self._length = stop - start

    @property
    def vocab_size(self) -> int:
        """The number of different tokens."""
        return self._tokens.vocab_size

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape."""
        return self._tokens.take(indices + self._start)

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        ends = self._tokens.ends() - self._start
        within = ends[(ends > 0) & (ends < self._length)]
        return np.append(within, self._length) if self._length else within


def as_tokens(tokens: Tokens | ArrayLike) -> Tokens:
    """Tokens, also of an array."""
    return tokens if isinstance(tokens, Tokens) else TokenArray(tokens)
