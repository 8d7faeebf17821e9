"""Which examples each batch is made of, and those batches as NumPy arrays.

Nothing here knows devices, so it can be sent to worker processes. *Row*, *batch* and
*step* are explained in `_loader.py`. A *position* is a row's position within its batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ._sources import Source


class HostBatch(NamedTuple):
    """This process's part of a batch."""

    arrays: dict[str, np.ndarray]
    #: Whether each row is an example, and not padding.
    real: Bool[np.ndarray, " rows"]


class HostBatches:
    """Makes this process's part of the batch of any step.

    **Arguments:**

    - `source`, `batch_size`, `seed`, `shuffle`, `transform`: as for the loader.
    - `pads`: whether to fill up the last batch of an epoch.
    - `positions`: the positions in a batch that this process holds.
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
        positions: Int[np.ndarray, " positions"],
    ):
        self.source = source
        self.batch_size = batch_size
        self.positions = positions
        self.pads = pads
        self.transform = transform
        self._seed = seed
        self._shuffle = shuffle
        full = len(source) // batch_size
        #: The number of batches in an epoch.
        self.length = -(-len(source) // batch_size) if pads else full
        # The last epoch's, because it takes long to make and much memory.
        self._order: tuple[int, Int[np.ndarray, " n"]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The examples of a step's batch, on all processes."""
        epoch, batch = divmod(step, self.length)
        start = batch * self.batch_size
        return self._epoch_order(epoch)[start : start + self.batch_size]

    def padded(
        self, steps: range, positions: Int[np.ndarray, " positions"]
    ) -> tuple[Int[np.ndarray, "steps positions"], Bool[np.ndarray, "steps positions"]]:
        """The rows at some positions of some steps' batches, and which are real."""
        real = np.zeros((len(steps), len(positions)), bool)
        padded = np.zeros((len(steps), len(positions)), np.int64)
        for i, step in enumerate(steps):
            rows = self.rows(step)
            real[i] = positions < len(rows)
            padded[i, real[i]] = rows[positions[real[i]]]
        return padded, real

    def gather(self, steps: range) -> list[HostBatch]:
        """The batches of some steps, from one call of the source's gather."""
        size = len(self.positions)
        padded, real = self.padded(steps, self.positions)
        arrays = self.source.gather(padded.reshape(-1))
        _check_rows("the source's gather", arrays, padded.size)
        return [
            self._finish(
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
        return self._finish(arrays, np.ones(count, bool)).arrays

    def _finish(
        self, arrays: dict[str, np.ndarray], real: Bool[np.ndarray, " rows"]
    ) -> HostBatch:
        size = len(real)
        if self.transform is not None:
            arrays = self.transform(arrays)
            _check_rows("the transform", arrays, size)
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in arrays.items():
            # Structured arrays are np.void; bfloat16, whose kind is the same, is not.
            if array.dtype.kind in "OSUMm" or issubclass(array.dtype.type, np.void):
                raise TypeError(
                    f"{name!r} is of type {array.dtype}, which devices cannot hold; use a "
                    "transform that converts it to numbers, or drops it."
                )
        if self.pads and "weight" in arrays:
            weight = arrays["weight"]
            if weight.shape != (size,):
                raise ValueError(
                    f"'weight' has shape {weight.shape} for {size} examples; give one "
                    "number per example, or use another name."
                )
            arrays = arrays | {"weight": np.where(real, weight, 0).astype(np.float32)}
        return HostBatch(arrays, real)

    def _epoch_order(self, epoch: int) -> Int[np.ndarray, " n"]:
        order = self._order
        if order is None or order[0] != epoch:
            order = epoch, self._make_order(epoch)
            self._order = order
        return order[1]

    def _make_order(self, epoch: int) -> Int[np.ndarray, " n"]:
        if not self._shuffle:
            return np.arange(len(self.source))
        # The only generator of NumPy whose stream is guaranteed never to change.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self.source))


class Chunks:
    """The batches of `together` steps at a time, which are gathered at once."""

    def __init__(self, batches: HostBatches, together: int, stop: int):
        self._batches = batches
        self._together = together
        self._stop = stop

    def __call__(self, start: int) -> list[HostBatch]:
        """The batches from a step on."""
        return self._batches.gather(range(start, min(start + self._together, self._stop)))


def check_integers(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise `ValueError` where JAX, which has 32 bits by default, would wrap integers."""
    for name, array in arrays.items():
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if array.dtype.kind in "iu" and dtype != array.dtype:
            low, high = int(array.min(initial=0)), int(array.max(initial=0))
            if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
                raise ValueError(
                    f"{name!r} has integers from {low} to {high}, which do not fit JAX's "
                    f"{dtype}; use a transform that makes them fit, or jax_enable_x64."
                )


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
