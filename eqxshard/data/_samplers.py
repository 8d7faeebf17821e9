"""Samplers: which examples make up an epoch, and in which order."""

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from .._errors import UsageError
from ._buckets import Buckets
from ._permutation import Permutation
from ._steps import Steps

#: Epochs of more rows than that are not made as a whole.
_WHOLE_ROWS = 2**20


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


class WeightedSampler:
    """Draws examples, again and again, in proportion to their weights.

    **Arguments:**

    - `weights`: one for each example of the source. They need not sum to 1; an example of
        weight 0 is never drawn.
    - `length`: the number of rows in an epoch; by default, the number of weights.

    **Raises:**

    `ValueError` if `weights` is not a vector of finite numbers of at least 0, all are 0,
    or `length` is not positive. The loader raises `ValueError` if its source has another
    number of examples.

    !!! Example

        ```python
        # Every class equally often.
        weights = 1 / np.bincount(labels)[labels]
        sampler = eqxshard.data.WeightedSampler(weights)
        loader = eqxshard.Loader(source, batch_size=256, mesh=mesh, sampler=sampler)
        ```
    """

    def __init__(self, weights: ArrayLike, length: int | None = None):
        self._weights = _check_weights(weights)
        self._length = len(self._weights) if length is None else length
        if self._length < 1:
            raise UsageError(f"length={length} must be at least 1.")

    def __len__(self) -> int:
        return self._length

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order; see [`eqxshard.data.Sampler`][]."""
        if examples != len(self._weights):
            raise UsageError(
                f"the sampler has {len(self._weights):,} weights and the source "
                f"{examples:,} examples; give one for each example."
            )
        totals = np.cumsum(self._weights)
        drawn = _random_state(seed, epoch).random_sample(self._length) * totals[-1]
        # Rounding may reach the total itself, which is beyond every example.
        last = np.flatnonzero(self._weights)[-1]
        return np.minimum(np.searchsorted(totals, drawn, side="right"), last)


@dataclass
class Order:
    """The rows of any part of any epoch.

    - `examples`: the length of the source.
    - `seed`, `shuffle`, `sampler`: as for the loader.
    """

    examples: int
    seed: int = 0
    shuffle: bool = True
    sampler: Sampler | None = None
    #: The last epoch that was made as a whole, and its rows.
    _last: tuple[int, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def __len__(self) -> int:
        """The number of rows in an epoch."""
        return self.examples if self.sampler is None else len(self.sampler)

    def steps(self, *sizes: tuple[int, int], fills: bool) -> Steps:
        """Which epoch each step is in, and where in it.

        **Arguments:**

        - `sizes`: from which step on there is which batch size; the first is for step 0.
        - `fills`: whether the last batch of an epoch is filled up, or left out.
        """
        (_, size), *later = sizes
        steps = Steps.of(size, self._places(size, fills), fills=fills)
        for first, size in later:
            steps = steps.change(first, size, self._places(size, fills))
        return steps

    def _places(self, batch_size: int, fills: bool) -> int:
        """The number of places in an epoch; of buckets, a batch takes all of its places."""
        if isinstance(self.sampler, Buckets):
            return self.sampler.batches(batch_size, fills=fills) * batch_size
        return len(self)

    def rows(self, epoch: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """The rows at some places of an epoch, as far as there are so many."""
        if self.sampler is None and len(self) > _WHOLE_ROWS:
            return self._unique(epoch, start, min(stop, len(self)))
        # Another thread may be in another epoch.
        last = self._last
        if last is None or last[0] != epoch:
            last = self._last = epoch, self._whole(epoch)
        return last[1][start:stop]

    def _whole(self, epoch: int) -> Int[np.ndarray, " n"]:
        if self.sampler is None:
            return self._unique(epoch, 0, len(self))
        return _sample(self.sampler, self.examples, self.seed, epoch)

    def _unique(self, epoch: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        if not self.shuffle:
            return np.arange(start, stop)
        return _permutation(self.examples, self.seed, epoch).rows(start, stop)


def _sample(
    sampler: Sampler, examples: int, seed: int, epoch: int
) -> Int[np.ndarray, " n"]:
    """The rows of an epoch, checked."""
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


def digest(rows: Int[np.ndarray, " n"]) -> str:
    """A short text that tells one epoch from another."""
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation(length, _random_state(seed, epoch))


def _random_state(seed: int, epoch: int) -> np.random.RandomState:
    # The only generator of NumPy whose stream is guaranteed never to change.
    return np.random.RandomState([seed, epoch])


def _check_weights(weights: Any) -> Float[np.ndarray, " n"]:
    found = np.asarray(weights, np.float64)
    if found.ndim != 1 or not np.all(np.isfinite(found) & (found >= 0)) or not found.any():
        raise UsageError(
            f"the weights have the shape {found.shape} and the sum {np.sum(found)}; give "
            "each example a finite number of at least 0, and not all of them 0."
        )
    return found
