"""A random order of many rows, of which any part can be computed without the rest."""

import math

import numpy as np
from jaxtyping import Int

#: Four mix well enough for any use (Luby and Rackoff); the others are for safety.
_ROUNDS = 8


class Permutation:
    """A random order of `range(length)`, in memory for about `8 * sqrt(length)` numbers.

    A Feistel network ([Luby and Rackoff, 1988](https://doi.org/10.1137/0217022)) whose
    round functions are tables of random numbers. Numbers are seen as places in a table
    that is about square, and each round moves every column along itself, or every row,
    by a random distance. Those that end outside of the range go through it again.

    **Arguments:**

    - `length`: how many rows there are.
    - `random`: decides the order.
    """

    def __init__(self, length: int, random: np.random.RandomState):
        self._length = length
        self._width = math.isqrt(length - 1) + 1
        self._height = -(-length // self._width)
        self._rounds = [
            (
                random.randint(0, self._width, self._height, np.int64),
                random.randint(0, self._height, self._width, np.int64),
            )
            for _ in range(_ROUNDS // 2)
        ]

    def rows(self, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """The rows at the positions from `start` to `stop - 1`."""
        found = self._permute(np.arange(start, stop))
        outside = np.flatnonzero(found >= self._length)
        while outside.size:
            found[outside] = self._permute(found[outside])
            outside = outside[found[outside] >= self._length]
        return found

    def _permute(self, numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Permute the numbers of the whole table, which may have more than the range."""
        y, x = np.divmod(numbers, self._width)
        for along_rows, along_columns in self._rounds:
            x += along_rows[y]
            x -= self._width * (x >= self._width)
            y += along_columns[x]
            y -= self._height * (y >= self._height)
        return y * self._width + x
