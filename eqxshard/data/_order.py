"""Which examples make up the batch of each step: epochs, their order, and samplers.

Glossary:

- a *row* is an example's index in the source;
- a *place* is a row's position in the order of its epoch;
- a *step* counts batches from the start of the first epoch, without end.
"""

import functools
import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from .._errors import UsageError

#: The order of an epoch is computed in stretches of so many rows, and the last is kept.
#: To compute that of each batch by itself would take longer than to read the batch.
_STRETCH = 2**16

#: The rounds of a `Permutation`. Four mix well enough for any use (Luby and Rackoff); the
#: others are for safety.
_ROUNDS = 8


@dataclass(frozen=True)
class Steps:
    """The epoch of each step, and the place in it where its batch starts.

    - `size`: the batch size.
    - `length`: the number of examples in an epoch.
    - `fills`: whether the last batch of an epoch is filled up, or left out.
    - `first`: the step that this counts from. Earlier ones may have had another batch size.
    - `examples`: the number of examples of all epochs before the batch of that step.
    """

    size: int
    length: int
    fills: bool = True
    first: int = 0
    examples: int = 0

    @functools.cached_property
    def each(self) -> int:
        """The number of steps in a whole epoch."""
        return self._count(self.length)

    @functools.cached_property
    def left(self) -> int:
        """The number of steps that are left in the epoch of the first step."""
        return self._count(self.length - self.examples % self.length)

    @property
    def remainder(self) -> int:
        """How many examples fill no batch, in the first epoch or else in later ones."""
        return (self.length - self.examples % self.length) % self.size or (
            self.length % self.size
        )

    def going_on(self, step: int, examples: int) -> "Steps":
        """The same batches, after some steps that took a number of examples."""
        start = replace(self, first=0, examples=0)
        if start.examples_before(step) == examples:
            return start
        return replace(self, first=step, examples=examples)

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step's batch, and the place in it where the batch starts."""
        epoch, start = divmod(self.examples, self.length)
        taken = step - self.first
        if taken < self.left:
            return epoch, start + taken * self.size
        later, batch = divmod(taken - self.left, self.each)
        return epoch + 1 + later, batch * self.size

    def examples_before(self, step: int) -> int:
        """The number of examples of all epochs before a step's batch."""
        epoch, start = self.place(step)
        return epoch * self.length + start

    def epochs(self, step: int) -> float:
        """How many epochs have passed before a step's batch."""
        return self.examples_before(step) / self.length

    def end(self, epochs: int) -> int:
        """The number of steps after which a number of epochs have ended.

        If they ended before the first step, it is not more than that.
        """
        epoch = self.examples // self.length
        if epochs > epoch:
            return self.first + self.left + (epochs - epoch - 1) * self.each
        return self.first - (self.examples > epochs * self.length)

    def next_end(self, step: int) -> int:
        """The number of steps after which the epoch of a step's batch has ended."""
        return self.end(self.place(step)[0] + 1)

    def ends_epoch(self, step: int) -> bool:
        """True if an epoch has just ended after a number of steps."""
        return self.end(self.place(step)[0]) == step

    def _count(self, places: int) -> int:
        return places // self.size + (self.fills and places % self.size > 0)


@runtime_checkable
class Sampler(Protocol):
    """Chooses the examples of each epoch, and their order.

    Its results must depend on the arguments alone. Then a run can resume at any step, and
    all processes and workers agree. Draw random numbers from
    `np.random.RandomState([seed, epoch])`, whose stream never changes.

    !!! Example

        ```python
        class Curriculum:
            # The first half of the examples in epochs 0 to 4, then the second half.
            def __len__(self):
                return 500

            def rows(self, examples, seed, epoch):
                order = np.random.RandomState([seed, epoch]).permutation(500)
                return order if epoch < 5 else order + 500
        ```
    """

    def __len__(self) -> int:
        """The number of rows in an epoch."""
        ...

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order; rows may repeat.

        It may be called in a thread or in worker processes.

        **Arguments:**

        - `examples`: the length of the source.
        - `seed`: the loader's.
        - `epoch`: counted from 0.

        **Returns:**

        As many rows as the sampler is long, each at least 0 and less than `examples`.
        """
        ...


class UniformSampler:
    """Draws examples with equal probabilities; an example may be drawn again.

    For sources with too many examples for an epoch of all of them, such as every window of
    a text ([`eqxshard.data.text.Windows`][]). The rows of an epoch are drawn together.

    **Arguments:**

    - `length`: the number of rows in an epoch.

    **Raises:**

    `ValueError` if `length` is not positive.

    !!! Example

        ```python
        sampler = eqxshard.data.UniformSampler(length=12_000)
        loader = eqxshard.Loader(windows, batch_size=12, mesh=mesh, sampler=sampler)
        ```
    """

    def __init__(self, length: int):
        if length < 1:
            raise UsageError(f"length={length} must be at least 1.")
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order; see [`eqxshard.data.Sampler`][]."""
        return _random_state(seed, epoch).randint(0, examples, self._length, np.int64)


@dataclass
class Order:
    """The rows of any part of any epoch of a source.

    - `examples`: the length of the source.
    - `seed`, `shuffle`, `sampler`: as for the loader.
    """

    examples: int
    seed: int = 0
    shuffle: bool = True
    sampler: Sampler | None = None
    #: The last stretch: its epoch, the place where it starts, and its rows.
    _last: tuple[int, int, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def __len__(self) -> int:
        """The number of rows in an epoch."""
        return self.examples if self.sampler is None else len(self.sampler)

    def rows(self, epoch: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """The rows at the places from `start` to `stop - 1` of an epoch that exist."""
        stop, found = min(stop, len(self)), []
        # A sampler gives an epoch as a whole.
        size = _STRETCH if self.sampler is None else len(self)
        while start < stop:
            first = start // size * size
            end = min(first + size, stop)
            found.append(self._stretch(epoch, first)[start - first : end - first])
            start = end
        return np.concatenate(found)

    def _stretch(self, epoch: int, first: int) -> Int[np.ndarray, " n"]:
        # Another thread may be in another stretch.
        last = self._last
        if last is None or last[:2] != (epoch, first):
            last = self._last = epoch, first, self._compute(epoch, first)
        return last[2]

    def _compute(self, epoch: int, first: int) -> Int[np.ndarray, " n"]:
        if self.sampler is not None:
            return _sample(self.sampler, self.examples, self.seed, epoch)
        stop = min(first + _STRETCH, self.examples)
        if not self.shuffle:
            return np.arange(first, stop)
        return _permutation(self.examples, self.seed, epoch).rows(first, stop)

    def digest(self) -> str | None:
        """A digest of the sampler's first epoch, to tell samplers apart."""
        if self.sampler is None:
            return None
        rows = self._stretch(0, 0)
        return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


def _sample(
    sampler: Sampler, examples: int, seed: int, epoch: int
) -> Int[np.ndarray, " n"]:
    """The rows that a sampler returns for an epoch, checked."""
    rows, length = np.asarray(sampler.rows(examples, seed, epoch)), len(sampler)
    if (
        rows.dtype.kind not in "iu"
        or rows.shape != (length,)
        or not 0 <= rows.min(initial=0) <= rows.max(initial=0) < max(examples, 1)
    ):
        raise UsageError(
            f"the sampler gave {rows.dtype} of shape {rows.shape} for epoch {epoch}, or "
            f"rows out of range; return {length:,} integers from 0 to {examples - 1}."
        )
    return rows


class Permutation:
    """A random order of `range(length)`, in memory for about `8 * sqrt(length)` numbers.

    A Feistel network ([Luby and Rackoff, 1988](https://doi.org/10.1137/0217022)) whose
    round functions are tables of random numbers. The numbers fill a table that is about
    square, and each round rotates every row, or every column, by a random distance.
    Numbers that end outside of the range go through the network again.

    **Arguments:**

    - `length`: the number of rows.
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


@functools.lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation(length, _random_state(seed, epoch))


def _random_state(seed: int, epoch: int) -> np.random.RandomState:
    # The only generator of NumPy whose stream is guaranteed never to change.
    return np.random.RandomState([seed, epoch])
