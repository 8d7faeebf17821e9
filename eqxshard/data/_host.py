"""Which examples each batch is made of, and those batches as NumPy arrays.

Nothing here knows devices, so it can be sent to worker processes. *Row*, *batch* and
*step* are explained in `_loader.py`. A *position* is a row's position within its batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from ._random import RandomTransform, example_generators
from ._samplers import Order
from ._sources import Source
from ._weights import WEIGHT, check_weights, part_to_check

#: What the loader calls with each batch.
Transform = Callable[[dict[str, Any]], dict[str, Any]] | RandomTransform


class HostBatches:
    """Makes this process's part of the batch of any step.

    **Arguments:**

    - `source`, `batch_size`, `seed`, `transform`: as for the loader.
    - `order`: the rows of each epoch.
    - `fills`: whether to fill up the last batch of an epoch, or to drop it.
    - `positions`: the positions in a batch that this process holds.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        batch_size: int,
        seed: int,
        fills: bool,
        transform: Transform | None,
        positions: Int[np.ndarray, " positions"],
    ):
        self.source = source
        self.batch_size = batch_size
        self.positions = positions
        self.transform = transform
        self._order = order
        self._seed = seed
        full, left = divmod(len(order), batch_size)
        #: Whether the last batch of an epoch has rows of padding.
        self.pads = fills and left > 0
        #: The number of batches in an epoch.
        self.length = full + self.pads

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The examples of a step's batch, on all processes."""
        return self._part(step)[0]

    def padded(
        self, steps: range, positions: Int[np.ndarray, " positions"]
    ) -> tuple[Int[np.ndarray, "steps positions"], Bool[np.ndarray, "steps positions"]]:
        """The rows at some positions of some steps' batches, and which are real.

        **Arguments:**

        - `steps`: the steps.
        - `positions`: in ascending order.
        """
        real = np.zeros((len(steps), len(positions)), bool)
        padded = np.zeros((len(steps), len(positions)), np.int64)
        for i, step in enumerate(steps):
            rows = self.rows(step)
            held = positions[: np.searchsorted(positions, len(rows))]
            real[i, : len(held)] = True
            padded[i, : len(held)] = rows[held]
        return padded, real

    def gather(self, steps: range) -> list[dict[str, np.ndarray]]:
        """The batches of some steps, from one call of the source's gather."""
        size = len(self.positions)
        padded, real = self.padded(steps, self.positions)
        arrays = self.source.gather(padded.reshape(-1))
        _check_rows("the source's gather", arrays, padded.size)
        return [
            self._finish(
                {name: array[i * size : (i + 1) * size] for name, array in arrays.items()},
                real[i],
                self._generators(step, padded[i]),
            )
            for i, step in enumerate(steps)
        ]

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of all processes without its values, for which one example is read."""
        row = np.zeros(1, np.int64)
        generators = example_generators(self._seed, 0, row, row)
        # As of padding, which has a weight.
        arrays = self._finish(self.source.gather(row), np.zeros(1, bool), generators)
        return {
            name: jax.ShapeDtypeStruct(
                (self.batch_size, *array.shape[1:]),
                jax.dtypes.canonicalize_dtype(array.dtype),
            )
            for name, array in arrays.items()
        }

    def everything(self) -> dict[str, np.ndarray]:
        """All the examples of the source, in its order."""
        count = len(self.source)
        arrays = self.source.gather(np.arange(count))
        _check_rows("the source's gather", arrays, count)
        return self._finish(arrays, np.ones(count, bool))

    def _finish(
        self,
        arrays: dict[str, np.ndarray],
        real: Bool[np.ndarray, " rows"],
        generators: list[np.random.Generator] | None = None,
    ) -> dict[str, np.ndarray]:
        size = len(real)
        if self.transform is not None:
            if isinstance(self.transform, RandomTransform):
                assert generators is not None
                arrays = self.transform.fn(arrays, generators)
            else:
                arrays = self.transform(arrays)
            _check_rows("the transform", arrays, size)
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        check_dtypes(arrays, "use a transform that converts it to numbers, or drops it")
        # Full batches without weights of their own share some on the devices.
        if self.pads and not (real.all() and WEIGHT not in arrays):
            weight = arrays.get(WEIGHT, np.ones(size, np.float32))
            if weight.shape != (size,):
                raise ValueError(
                    f"{WEIGHT!r} has shape {weight.shape} for {size} examples; give one "
                    "number per example, or use another name."
                )
            arrays = arrays | {WEIGHT: np.where(real, weight, 0).astype(np.float32)}
        check_weights(part_to_check(arrays, size == self.batch_size))
        return arrays

    def _generators(
        self, step: int, rows: Int[np.ndarray, " rows"]
    ) -> list[np.random.Generator] | None:
        """Generators for this process's rows of a step, if the transform wants any."""
        if not isinstance(self.transform, RandomTransform):
            return None
        repeats = self._part(step)[1]
        repeats = np.pad(repeats, (0, self.batch_size - len(repeats)))[self.positions]
        return example_generators(self._seed, step // self.length, rows, repeats)

    def _part(self, step: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """The rows of a step's batch, and how often each came before in its epoch."""
        epoch, batch = divmod(step, self.length)
        start = batch * self.batch_size
        return self._order.part(epoch, start, start + self.batch_size)


def check_dtypes(arrays: Mapping[str, np.ndarray], remedy: str) -> None:
    """Raise `TypeError` for what devices cannot hold: strings, None, ragged rows."""
    for name, array in arrays.items():
        # Structured arrays are np.void; bfloat16, whose kind is the same, is not.
        if array.dtype.kind in "OSUMm" or issubclass(array.dtype.type, np.void):
            raise TypeError(
                f"{name!r} is of type {array.dtype}, which devices cannot hold; {remedy}."
            )


def check_integers(arrays: Mapping[str, np.ndarray]) -> None:
    """Raise `ValueError` where JAX, which has 32 bits by default, would wrap integers."""
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
            continue
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype != array.dtype:
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
