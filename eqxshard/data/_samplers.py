"""Samplers: which examples make up an epoch, and in which order."""

import functools
import hashlib
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from ._permutation import Permutation

#: An order of more rows than that is not kept in memory as a whole.
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


class InOrder:
    """Each example once, in the order of the source."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def part(self, seed: int, epoch: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Some consecutive rows of an epoch."""
        return np.arange(start, stop)


class Permuted:
    """Each example once, in another order in each epoch, for any number of examples."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def part(self, seed: int, epoch: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Some consecutive rows of an epoch."""
        return _permutation(self._length, seed, epoch).rows(start, stop)


#: The samplers that give any part of an epoch, in which no row comes twice.
InParts = InOrder | Permuted


class Shuffled:
    """Each example once, in another order in each epoch, which is made as a whole."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order."""
        return _random_state(seed, epoch).permutation(examples)


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
            raise ValueError(f"length={length} must be at least 1.")
        self._length = length

    def __len__(self) -> int:
        return self._length

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order; see [`eqxshard.data.Sampler`][]."""
        return _random_state(seed, epoch).randint(0, examples, self._length, np.int64)


class WeightedSampler:
    """Draws examples with probabilities in proportion to their weights.

    **Arguments:**

    - `weights`: one for each example of the source. They need not sum to 1; an example of
        weight 0 is never drawn.
    - `length`: the number of rows in an epoch; by default, the number of weights.
    - `replacement`: whether an example may be drawn again in the same epoch. If not, each
        draw is from the examples that are left
        ([Efraimidis and Spirakis, 2006](https://doi.org/10.1016/j.ipl.2005.11.003)), and
        the rows of an epoch are then shuffled.

    **Raises:**

    `ValueError` if `weights` is not a vector of finite numbers of at least 0, all are 0,
    or `length` is not positive, or too large without replacement. The loader raises
    `ValueError` if its source has another number of examples.

    !!! Example

        ```python
        sampler = eqxshard.data.WeightedSampler(weights, length=10_000)
        loader = eqxshard.Loader(source, batch_size=256, mesh=mesh, sampler=sampler)
        ```
    """

    def __init__(
        self, weights: ArrayLike, length: int | None = None, *, replacement: bool = True
    ):
        self._weights = _check_weights(weights)
        self._length = len(self._weights) if length is None else length
        self._replacement = replacement
        positive = np.count_nonzero(self._weights)
        if self._length < 1:
            raise ValueError(f"length={length} must be at least 1.")
        if not replacement and self._length > positive:
            raise ValueError(
                f"{self._length:,} rows cannot be drawn without replacement from "
                f"{positive:,} examples of positive weight; use a smaller length, or "
                "replacement=True."
            )

    def __len__(self) -> int:
        return self._length

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order; see [`eqxshard.data.Sampler`][]."""
        _check_length("weights", len(self._weights), examples)
        random = _random_state(seed, epoch)
        if self._replacement:
            totals = np.cumsum(self._weights)
            drawn = random.random_sample(self._length) * totals[-1]
            # Rounding may reach the total itself, which is beyond every example.
            last = np.flatnonzero(self._weights)[-1]
            return np.minimum(np.searchsorted(totals, drawn, side="right"), last)
        with np.errstate(divide="ignore"):
            times = -np.log1p(-random.random_sample(examples)) / self._weights
        times[self._weights == 0] = np.inf
        return random.permutation(np.argsort(times, kind="stable")[: self._length])


class ClassBalancedSampler:
    """Draws every class equally often, whatever its number of examples.

    In each epoch the numbers of rows of two classes differ by one at most. Within a class,
    examples are drawn with replacement. An epoch is as long as the source.

    **Arguments:**

    - `labels`: the class of each example, as integers or strings.

    **Raises:**

    `ValueError` if `labels` is not a vector, or is empty. The loader raises `ValueError`
    if its source has another number of examples.

    !!! Example

        ```python
        sampler = eqxshard.data.ClassBalancedSampler(source.arrays["label"])
        ```
    """

    def __init__(self, labels: ArrayLike):
        found = np.asarray(labels)
        if found.ndim != 1 or not found.size:
            raise ValueError(
                f"the labels have shape {found.shape}; give one label per example."
            )
        _, classes, self._counts = np.unique(found, return_inverse=True, return_counts=True)
        # The examples by class, and where each class starts.
        self._by_class = np.argsort(classes, kind="stable")
        self._starts = np.cumsum(self._counts) - self._counts

    def __len__(self) -> int:
        return len(self._by_class)

    def rows(self, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
        """The rows of an epoch, in order; see [`eqxshard.data.Sampler`][]."""
        _check_length("labels", len(self), examples)
        random = _random_state(seed, epoch)
        # Another class has the extra row in each epoch.
        classes = random.permutation(len(self._counts))
        drawn = random.permutation(np.resize(classes, len(self)))
        within = random.random_sample(len(self)) * self._counts[drawn]
        # A product may round up to the count itself.
        within = np.minimum(within.astype(np.int64), self._counts[drawn] - 1)
        return self._by_class[self._starts[drawn] + within]


def default_sampler(length: int, shuffle: bool) -> Sampler | InParts:
    """The sampler of a loader that has none."""
    if not shuffle:
        return InOrder(length)
    return Shuffled(length) if length <= _WHOLE_ROWS else Permuted(length)


def sample(sampler: Sampler, examples: int, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """The rows of an epoch, checked."""
    rows, length = np.asarray(sampler.rows(examples, seed, epoch)), len(sampler)
    if rows.dtype.kind not in "iu" or rows.shape != (length,):
        raise ValueError(
            f"the sampler gave {rows.dtype} of shape {rows.shape} for epoch {epoch}, and "
            f"its length is {length:,}; return one integer for each row of an epoch."
        )
    low, high = int(rows.min(initial=0)), int(rows.max(initial=0))
    if low < 0 or high >= examples:
        raise ValueError(
            f"the sampler gave row {low if low < 0 else high} in epoch {epoch}, and the "
            f"source has {examples:,} examples; return rows from 0 to {examples - 1}."
        )
    return rows


def digest(rows: Int[np.ndarray, " n"]) -> str:
    """A short text that tells one epoch from another."""
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16]


def count_repeats(rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """How often each row of an epoch came before in it."""
    repeats = np.zeros(len(rows), np.int64)
    counts = np.bincount(rows)
    if counts.max() > 1:
        starts = np.cumsum(counts) - counts
        order = np.argsort(rows, kind="stable")
        repeats[order] = np.arange(len(rows)) - np.repeat(starts, counts)
    return repeats


@functools.lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation(length, _random_state(seed, epoch))


def _random_state(seed: int, epoch: int) -> np.random.RandomState:
    # The only generator of NumPy whose stream is guaranteed never to change.
    return np.random.RandomState([seed, epoch])


def _check_weights(weights: Any) -> Float[np.ndarray, " n"]:
    found = np.asarray(weights, np.float64)
    if found.ndim != 1:
        raise ValueError(
            f"the weights have shape {found.shape}; give one number per example."
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise ValueError(
            f"the weight of example {wrong[0]} is {found[wrong[0]]}; give finite numbers "
            "of at least 0."
        )
    if not found.any():
        raise ValueError("all weights are 0; give at least one example a positive weight.")
    return found


def _check_length(what: str, length: int, examples: int) -> None:
    if length != examples:
        raise ValueError(
            f"the sampler has {length:,} {what} and the source {examples:,} examples; give "
            "one for each example."
        )
