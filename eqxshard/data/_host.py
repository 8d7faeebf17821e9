"""Which examples each batch is made of, and those batches as NumPy arrays.

Nothing here knows devices, so it can be sent to worker processes. *Row*, *batch* and
*step* are explained in `_loader.py`. A *position* is a row's position within its batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from ._random import ExampleRandom, RandomTransform, example_keys
from ._samplers import InParts, Sampler, count_repeats, sample
from ._sources import Source
from ._weights import WEIGHT, check_weights, part_to_check

#: How many rows of an epoch are computed at a time, if they need not be all.
_STRETCH_ROWS = 2**16

#: What the loader calls with each batch.
Transform = Callable[[dict[str, Any]], dict[str, Any]] | RandomTransform


class HostBatch(NamedTuple):
    """This process's part of a batch."""

    arrays: dict[str, np.ndarray]
    #: Whether each row is an example, and not padding.
    real: Bool[np.ndarray, " rows"]


class Stretch(NamedTuple):
    """The rows of consecutive batches of an epoch, in order."""

    epoch: int
    #: The first of the batches.
    first: int
    rows: Int[np.ndarray, " n"]
    #: How often each row came before in its epoch; only known for random transforms.
    repeats: Int[np.ndarray, " n"] | None


class HostBatches:
    """Makes this process's part of the batch of any step.

    **Arguments:**

    - `source`, `batch_size`, `seed`, `transform`: as for the loader.
    - `sampler`: chooses the rows of each epoch.
    - `fills`: whether to fill up the last batch of an epoch, or to drop it.
    - `positions`: the positions in a batch that this process holds.
    """

    def __init__(
        self,
        source: Source,
        sampler: Sampler | InParts,
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
        self._sampler = sampler
        self._seed = seed
        full, left = divmod(len(sampler), batch_size)
        #: Whether the last batch of an epoch has rows of padding.
        self.pads = fills and left > 0
        #: The number of batches in an epoch.
        self.length = full + self.pads
        whole = not isinstance(sampler, InParts)
        self._together = self.length if whole else max(_STRETCH_ROWS // batch_size, 1)
        # The last one used, because it takes long to make.
        self._stretch: Stretch | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stretch": None}

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The examples of a step's batch, on all processes."""
        stretch, part = self._find(step)
        return stretch.rows[part]

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
                self._random(step, padded[i]),
            )
            for i, step in enumerate(steps)
        ]

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of all processes without its values, for which one example is read."""
        row = np.zeros(1, np.int64)
        random = ExampleRandom(example_keys(self._seed, 0, row, row))
        arrays = self._finish(self.source.gather(row), np.ones(1, bool), random).arrays
        found = {
            name: jax.ShapeDtypeStruct(
                (self.batch_size, *array.shape[1:]),
                jax.dtypes.canonicalize_dtype(array.dtype),
            )
            for name, array in arrays.items()
        }
        weight = jax.ShapeDtypeStruct((self.batch_size,), np.float32)
        return {WEIGHT: weight} | found if self.pads else found

    def everything(self) -> dict[str, np.ndarray]:
        """All the examples of the source, in its order."""
        count = len(self.source)
        arrays = self.source.gather(np.arange(count))
        _check_rows("the source's gather", arrays, count)
        return self._finish(arrays, np.ones(count, bool)).arrays

    def _finish(
        self,
        arrays: dict[str, np.ndarray],
        real: Bool[np.ndarray, " rows"],
        random: ExampleRandom | None = None,
    ) -> HostBatch:
        size = len(real)
        if self.transform is not None:
            if isinstance(self.transform, RandomTransform):
                assert random is not None
                arrays = self.transform.fn(arrays, random)
            else:
                arrays = self.transform(arrays)
            _check_rows("the transform", arrays, size)
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        check_dtypes(arrays, "use a transform that converts it to numbers, or drops it")
        if self.pads and WEIGHT in arrays:
            weight = arrays[WEIGHT]
            if weight.shape != (size,):
                raise ValueError(
                    f"{WEIGHT!r} has shape {weight.shape} for {size} examples; give one "
                    "number per example, or use another name."
                )
            arrays = arrays | {WEIGHT: np.where(real, weight, 0).astype(np.float32)}
        check_weights(part_to_check(arrays, real, self.batch_size))
        return HostBatch(arrays, real)

    def _random(self, step: int, rows: Int[np.ndarray, " rows"]) -> ExampleRandom | None:
        """Random numbers for this process's rows of a step, if the transform wants any."""
        if not isinstance(self.transform, RandomTransform):
            return None
        stretch, part = self._find(step)
        assert stretch.repeats is not None
        found = stretch.repeats[part]
        repeats = np.pad(found, (0, self.batch_size - len(found)))[self.positions]
        return ExampleRandom(example_keys(self._seed, stretch.epoch, rows, repeats))

    def _find(self, step: int) -> tuple[Stretch, slice]:
        """A stretch that has a step's batch, and where its rows are in that."""
        epoch, batch = divmod(step, self.length)
        first = batch - batch % self._together
        stretch = self._stretch
        if stretch is None or (stretch.epoch, stretch.first) != (epoch, first):
            stretch = self._stretch = self._make_stretch(epoch, first)
        start = (batch - first) * self.batch_size
        return stretch, slice(start, start + self.batch_size)

    def _make_stretch(self, epoch: int, first: int) -> Stretch:
        sampler = self._sampler
        if isinstance(sampler, InParts):
            start = first * self.batch_size
            stop = min(start + self._together * self.batch_size, len(sampler))
            rows = sampler.part(self._seed, epoch, start, stop)
            return Stretch(epoch, first, rows, np.zeros_like(rows))
        rows = sample(sampler, len(self.source), self._seed, epoch)
        random = isinstance(self.transform, RandomTransform)
        return Stretch(epoch, first, rows, count_repeats(rows) if random else None)


class Chunks:
    """The batches of `together` steps at a time, which are gathered at once."""

    def __init__(self, batches: HostBatches, together: int, stop: int):
        self._batches = batches
        self._together = together
        self._stop = stop

    def __call__(self, start: int) -> list[HostBatch]:
        """The batches from a step on."""
        return self._batches.gather(range(start, min(start + self._together, self._stop)))


def check_dtypes(arrays: Mapping[str, np.ndarray], remedy: str) -> None:
    """Raise `TypeError` for what devices cannot hold, such as strings."""
    for name, array in arrays.items():
        # Structured arrays are np.void; bfloat16, whose kind is the same, is not.
        if array.dtype.kind in "OSUMm" or issubclass(array.dtype.type, np.void):
            raise TypeError(
                f"{name!r} is of type {array.dtype}{_contents(array)}, which devices "
                f"cannot hold; {remedy}."
            )


def _contents(array: np.ndarray) -> str:
    """Why an array is one of objects, if that can be told."""
    if array.dtype.kind != "O":
        return ""
    for row, item in enumerate(array):
        if item is None:
            return f" (None in row {row})"
    shapes = [np.shape(item) for item in array if isinstance(item, np.ndarray | list)]
    for shape in shapes:
        if shape != shapes[0]:
            return f" (rows of different shapes, {shapes[0]} and {shape})"
    return ""


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
