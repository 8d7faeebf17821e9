"""Batches on the host: which examples a step takes, gathered as NumPy arrays.

None of this knows of devices, so that it can be sent to worker processes. What *row*,
*batch* and *step* are, `_loader.py` says. A *place* is a row's place within its batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ._sources import Source


class HostBatch(NamedTuple):
    """This process's part of a batch."""

    arrays: dict[str, np.ndarray]
    #: Whether each row is an example's, and not padding.
    real: Bool[np.ndarray, " rows"]


class HostBatches:
    """Makes this process's part of the batch of any step.

    **Arguments:**

    - `source`, `batch_size`, `seed`, `shuffle`, `transform`: as for the loader.
    - `pads`: whether the loader fills up the last batch of an epoch.
    - `places`: which places of a batch are this process's.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        pads: bool,
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None,
        places: Int[np.ndarray, " places"],
    ):
        self.source = source
        self.batch_size = batch_size
        self.places = places
        self._seed = seed
        self._shuffle = shuffle
        self._pads = pads
        self._transform = transform
        self.length = len(source) // batch_size
        if pads:
            self.length = -(-len(source) // batch_size)
        # Of the last epoch that was asked for: it takes a while to make, and much space.
        self._order: tuple[int, Int[np.ndarray, " n"]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The examples of a step's batch, on all processes."""
        epoch, batch = divmod(step, self.length)
        start = batch * self.batch_size
        return self._order_of(epoch)[start : start + self.batch_size]

    def padded(
        self, steps: range, places: Int[np.ndarray, " places"]
    ) -> tuple[Int[np.ndarray, "steps places"], Bool[np.ndarray, "steps places"]]:
        """The rows at some places of the batches of some steps, and which are real."""
        real = np.zeros((len(steps), len(places)), bool)
        padded = np.zeros((len(steps), len(places)), np.int64)
        for i, step in enumerate(steps):
            rows = self.rows(step)
            real[i] = places < len(rows)
            padded[i, real[i]] = rows[places[real[i]]]
        return padded, real

    def gather(self, steps: range) -> list[HostBatch]:
        """The batches of some steps, from one call of the source's gather."""
        size = len(self.places)
        padded, real = self.padded(steps, self.places)
        arrays = self.source.gather(padded.reshape(-1))
        _check_rows("the source's gather", arrays, padded.size)
        return [
            self._batch(
                {name: array[i * size : (i + 1) * size] for name, array in arrays.items()},
                real[i],
            )
            for i in range(len(steps))
        ]

    def everything(self) -> dict[str, np.ndarray]:
        """All the examples of the source, in its order."""
        count = len(self.source)
        arrays = self.source.gather(np.arange(count))
        _check_rows("the source's gather", arrays, count)
        return self._batch(arrays, np.ones(count, bool)).arrays

    def _batch(
        self, arrays: dict[str, np.ndarray], real: Bool[np.ndarray, " rows"]
    ) -> HostBatch:
        size = len(real)
        if self._transform is not None:
            arrays = self._transform(arrays)
            _check_rows("the transform", arrays, size)
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in arrays.items():
            # Records are np.void; bfloat16, whose kind is the same, is not.
            if array.dtype.kind in "OSUMm" or issubclass(array.dtype.type, np.void):
                raise TypeError(
                    f"{name!r} is of type {array.dtype}, which has no place on devices; "
                    "use a transform that makes numbers of it, or leaves it out."
                )
        if self._pads and "weight" in arrays:
            weight = arrays["weight"]
            if weight.shape != (size,):
                raise ValueError(
                    f"'weight' has shape {weight.shape} for {size} examples; give one "
                    "number for each, or use another name."
                )
            arrays = arrays | {"weight": np.where(real, weight, 0).astype(np.float32)}
        return HostBatch(arrays, real)

    def _order_of(self, epoch: int) -> Int[np.ndarray, " n"]:
        order = self._order
        if order is None or order[0] != epoch:
            order = epoch, self._make_order(epoch)
            self._order = order
        return order[1]

    def _make_order(self, epoch: int) -> Int[np.ndarray, " n"]:
        if not self._shuffle:
            return np.arange(len(self.source))
        # Of NumPy's generators, this is the one whose stream never changes.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self.source))


class Chunks:
    """The batches of `together` steps at a time: what is made at once."""

    def __init__(self, batches: HostBatches, together: int, stop: int):
        self._batches = batches
        self._together = together
        self._stop = stop

    def __call__(self, start: int) -> list[HostBatch]:
        """The batches from a step on."""
        return self._batches.gather(range(start, min(start + self._together, self._stop)))


def _check_rows(who: str, arrays: Any, count: int) -> None:
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"{who} returned a {type(arrays).__name__}; return a dict of arrays by name."
        )
    for name, array in arrays.items():
        if np.shape(array)[:1] != (count,):
            raise ValueError(
                f"{who} returned {name!r} of shape {np.shape(array)} for {count} rows; "
                "return that many rows in each entry."
            )
