"""Which examples each batch is made of, and those batches as NumPy arrays.

Nothing here knows devices, so it can be sent to worker processes. *Row*, *batch* and
*step* are explained in `_loader.py`. A *position* is a row's position within its batch.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Int

from .._errors import UsageError, UsageTypeError
from ..sharding._batch_weights import WEIGHT, check_weights
from ..sharding._leaves import GRAPHS, check_dtypes
from ..sharding._text import first_few
from ._buckets import BucketBatch, Buckets, Span, stack_rows
from ._samplers import Order
from ._sources import ArraySource, Source, copied
from ._steps import Steps


@dataclass(frozen=True)
class RandomTransform:
    """A transform that draws random numbers, for the `transform` of [`eqxshard.Loader`][].

    An example's draws are a function of the loader's seed, the epoch and the example's
    place in the order of that epoch. So they are the same on any number of processes and
    workers, for any batch size, and in a run that was resumed.

    The generators are NumPy's, and take about 15 microseconds each to make. Augment small
    images on the devices instead, in the loss function, with its `key`. (NumPy may change
    what a generator draws in a later version.)

    **Arguments:**

    - `fn`: called with a dict of NumPy arrays, as any transform, and with a list of one
        `numpy.random.Generator` for each of their rows; returns a dict of arrays.

    !!! Example

        ```python
        def flip(batch, generators):
            flips = [generator.random() < 0.5 for generator in generators]
            pairs = zip(batch["image"], flips)
            images = [image[:, ::-1] if flip else image for image, flip in pairs]
            return {**batch, "image": np.stack(images)}


        loader = eqxshard.Loader(
            source,
            batch_size=256,
            mesh=mesh,
            transform=eqxshard.data.RandomTransform(flip),
        )
        ```
    """

    fn: Callable[[dict[str, Any], list[np.random.Generator]], dict[str, Any]]


#: What the loader calls with each batch.
Transform = Callable[[dict[str, Any]], dict[str, Any]] | RandomTransform


@dataclass
class HostBatches:
    """Makes this process's part of the batch of any step.

    - `order`: the rows of each epoch.
    - `steps`: which of them are each step's.
    - `positions`: the positions in a batch that this process holds.
    - `source`, `transform`: as for the loader.
    """

    source: Source
    order: Order
    steps: Steps
    transform: Transform | None
    positions: Int[np.ndarray, " positions"]

    @property
    def pads(self) -> bool:
        """Whether some batches have rows of padding."""
        last, buckets = self.steps.last, self.buckets
        left = last.remainder if buckets is None else buckets.left_over(last.size).any()
        return last.fills and bool(left)

    @property
    def buckets(self) -> Buckets | None:
        """What pads examples to a few lengths, if the sampler does."""
        sampler = self.order.sampler
        return sampler if isinstance(sampler, Buckets) else None

    @property
    def batch_size(self) -> int:
        """The batch size, as of the last change."""
        return self.steps.last.size

    @property
    def length(self) -> int:
        """The number of batches in a whole epoch."""
        return self.steps.last.each

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The examples of a step's batch, on all processes."""
        epoch, start, stop, _ = self.span(step)
        return self.order.rows(epoch, start, stop)

    def span(self, step: int) -> Span:
        """The places of a step's batch in its epoch."""
        (epoch, start), size = self.steps.place(step), self.steps.size(step)
        if self.buckets is None:
            return Span(epoch, start, start + size)
        seed, number, fills = self.order.seed, start // size, self.steps.last.fills
        return self.buckets.span(seed, epoch, number, size, fills=fills)

    def padded_length(self, step: int) -> int | None:
        """What a step's batch is padded to, if examples are of several lengths."""
        return None if self.buckets is None else self.span(step).length

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
            if self.buckets is not None:
                # Padding must not be longer than the others.
                padded[i] = rows[0]
            held = positions[: np.searchsorted(positions, len(rows))]
            real[i, : len(held)] = True
            padded[i, : len(held)] = rows[held]
        return padded, real

    def gather(self, steps: range) -> list[dict[str, np.ndarray]]:
        """The batches of some steps, from one call of the source's gather."""
        try:
            return self._gather(steps)
        except StopIteration as error:
            # Whoever iterates over the batches would take it for their end.
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise RuntimeError(
                f"line {at.lineno} of {at.filename} raised StopIteration while the batch "
                f"of step {steps.start} was made; give next() a default there, or raise "
                "another error."
            ) from error

    def _gather(self, steps: range) -> list[dict[str, np.ndarray]]:
        size = len(self.positions)
        padded, real = self.padded(steps, self.positions)
        arrays = self._read(padded.reshape(-1))
        return [
            self._finish(
                {name: array[i * size : (i + 1) * size] for name, array in arrays.items()},
                real[i],
                self._generators(step),
                self.padded_length(step),
            )
            for i, step in enumerate(steps)
        ]

    def shapes(self, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of all processes without its values, for which one example is read."""
        step = self.steps.last.first
        longest = None if self.buckets is None else self.buckets.boundaries[-1]
        arrays = self._read(np.zeros(1, int))
        generators = self._generators(step)[:1]
        # As of padding, which has a weight.
        arrays = self._finish(arrays, np.zeros(1, bool), generators, longest)
        shapes = {
            name: jax.ShapeDtypeStruct(
                (self.batch_size, *array.shape[1:]),
                jax.dtypes.canonicalize_dtype(array.dtype),
                sharding=sharding,
            )
            for name, array in arrays.items()
        }
        return shapes if longest is None else BucketBatch(shapes, longest)

    def everything(self) -> dict[str, np.ndarray]:
        """All the examples of the source, in its order."""
        count = len(self.source)
        arrays = self._read(np.arange(count))
        return self._finish(arrays, np.ones(count, bool), [])

    def _read(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in memory that nothing else refers to."""
        arrays = _checked("the source's gather", self.source.gather(indices), len(indices))
        if type(self.source) is ArraySource:
            return arrays
        return {name: copied(array) for name, array in arrays.items()}

    def _finish(
        self,
        arrays: dict[str, np.ndarray],
        real: Bool[np.ndarray, " rows"],
        generators: list[np.random.Generator],
        length: int | None = None,
    ) -> dict[str, np.ndarray]:
        size = len(real)
        if self.buckets is not None and length is not None:
            arrays = self.buckets.pad(arrays, length)
        if self.transform is not None:
            ours = dict(arrays)
            if isinstance(self.transform, RandomTransform):
                made = self.transform.fn(arrays, generators)
            else:
                made = self.transform(arrays)
            # The transform may have made the others in memory that it uses again.
            arrays = {
                name: array if array is ours.get(name) else copied(array)
                for name, array in _checked("the transform", made, size).items()
            }
        _check_not_ragged(arrays)
        named = ((repr(name), array) for name, array in arrays.items())
        check_dtypes(named, "use a transform that converts it to numbers, or drops it")
        # Full batches without weights of their own share some on the devices.
        if self.pads and not (real.all() and WEIGHT not in arrays):
            weight = arrays.get(WEIGHT, np.ones(size, np.float32))
            if weight.shape != (size,):
                raise UsageError(
                    f"{WEIGHT!r} has shape {weight.shape} for {size} examples; give one "
                    "number per example, or use another name."
                )
            arrays = arrays | {WEIGHT: np.where(real, weight, 0).astype(np.float32)}
        check_weights(arrays, whole=size == self.batch_size)
        return arrays

    def _generators(self, step: int) -> list[np.random.Generator]:
        """A generator for each of this process's rows, if the transform wants any."""
        if not isinstance(self.transform, RandomTransform):
            return []
        epoch, start, _, _ = self.span(step)
        places = (start + self.positions).tolist()
        return [np.random.default_rng([self.order.seed, epoch, place]) for place in places]


def _checked(who: str, arrays: Any, count: int) -> dict[str, np.ndarray]:
    """The entries of some examples; a list of ragged ones as an array of objects."""
    if not isinstance(arrays, Mapping):
        raise UsageTypeError(
            f"{who} returned a {type(arrays).__name__}; return a dict of arrays by name."
        )
    found = {
        name: stack_rows(entry) if isinstance(entry, list) else np.asarray(entry)
        for name, entry in arrays.items()
    }
    for name, array in found.items():
        if array.shape[:1] != (count,):
            raise UsageError(
                f"{who} returned {name!r} of shape {array.shape} for {count} rows; "
                f"return that many rows in each entry ({GRAPHS})."
            )
    return found


def _check_not_ragged(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        is_array = array.dtype == object and [isinstance(x, np.ndarray) for x in array.flat]
        if is_array and all(is_array):
            shapes = sorted({row.shape for row in array.flat})
            raise UsageError(
                f"{name!r} has rows of the shapes {first_few([*map(str, shapes)])}; pad "
                "or crop them to one shape in the source or with a transform, or batch "
                "examples of similar length with sampler=eqxshard.data.Buckets(...)."
            )
