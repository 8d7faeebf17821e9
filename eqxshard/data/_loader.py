"""The loader: from a source, on the host, to sharded batches on their devices.

Three kinds of number:

- a *row* is an example's place in the source;
- a *batch* is counted within its epoch, from 0 to below `len(loader)`;
- a *step* counts batches from the start of the first epoch, without end. It is all the
  position there is: `epoch, batch = divmod(step, len(loader))`.
"""

import itertools
import math
import operator
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from ..mesh import batch_sharding, check_batch_size
from ._sources import Source

Remainder = Literal["pad", "drop", "error"]

#: Handing something from one thread to another costs as much as gathering a batch of
#: small images, so batches are gathered and handed over together while they are small.
_TOGETHER_BYTES = 2**21
_TOGETHER_BATCHES = 16


class _HostBatch(NamedTuple):
    arrays: dict[str, np.ndarray]
    examples: int  # the rows before the padding


class Loader:
    """Makes batches of a source's examples, and places them on a mesh.

    Iterating gives dicts of global `jax.Array`s, their rows split over the mesh's `data`
    and `fsdp` axes, from the loader's position on. Each device gets its own rows only.
    Batches are gathered ahead in a [Grain](https://google-grain.readthedocs.io) thread,
    which ends when the iterator is closed or dropped.

    The order of the examples is a function of `seed` and the epoch alone, so it is the
    same on any number of devices; a batch is a function of its step. No batch mixes
    epochs, and within an epoch no example comes twice.

    Several iterators of one loader do not disturb each other: each starts from where the
    loader is when it is made, and the loader is where the last one to advance is.

    **Arguments:**

    - `source`: an [`eqxshard.data.Source`][], such as [`eqxshard.data.ArraySource`][].
    - `batch_size`: the number of rows of a batch, over all devices.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `seed`: which orders to go through the source in, one for each epoch.
    - `shuffle`: whether to; else every epoch is in the order of the source.
    - `epochs`: how many there are, counted from step 0; without end by default.
    - `remainder`: what to do with the last examples of an epoch, where `batch_size` does
        not divide the length of the source. `"pad"` fills the batch up with rows of
        weight 0, and gives every batch an entry `"weight"`, of float32 (where there is
        one already, it is multiplied); `"drop"` leaves the examples out in this epoch;
        `"error"` raises at once.
    - `transform`: called with a dict of NumPy arrays, a whole batch at once, returns
        one with as many rows, which is not to change afterwards. It runs in the loader's
        thread.
    - `prefetch`: how many batches to gather ahead. Without a `transform`, batches of up
        to one mebibyte are gathered some at a time, so that a few more may be. With
        0, each is gathered when it is asked for, without a thread.

    **Raises:**

    `TypeError` if `source` is not a source, or `batch_size` or `seed` is not an integer;
    `ValueError` if the source is empty, if `batch_size` does not divide over the mesh or
    (see `remainder`) does not suit the source, or if another number is not one that makes
    sense. While iterating, `ValueError` if the source or the transform returns another
    number of rows than it should, or integers that need 64 bits where JAX has 32,
    `TypeError` if it returns what no device can hold, and whatever they raise themselves.

    !!! Example

        ```python
        loader = eqxshard.Loader(source, batch_size=256, mesh=mesh)
        for batch in loader:
            state, metrics = train_step(state, batch)
        ```
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        mesh: Mesh,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        remainder: Remainder = "pad",
        transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        prefetch: int = 2,
    ):
        _check_source(source)
        # Python's integers, also where NumPy's came: state() is for JSON.
        batch_size, seed = operator.index(batch_size), operator.index(seed)
        check_batch_size(batch_size, mesh)
        _check_remainder(remainder, len(source), batch_size)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} is not a seed; use 0 to 2**32 - 1.")
        if epochs is not None and epochs < 1:
            raise ValueError(
                f"epochs={epochs} is not a number of epochs; use 1 or more, or None for no "
                "end."
            )
        if prefetch < 0:
            raise ValueError(
                f"prefetch={prefetch} is not a number of batches; use 0 or more."
            )
        self._source = source
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._remainder = remainder
        self._transform = transform
        self._prefetch = prefetch
        self._length = len(source) // batch_size
        if remainder == "pad":
            self._length = -(-len(source) // batch_size)
        self._stop = sys.maxsize if epochs is None else epochs * self._length
        self._step = 0
        self._sharding = batch_sharding(mesh)
        self._ones: Array | None = None
        # Kept for an epoch; a cache of this loader's own, which ends with it.
        self._order = lru_cache(maxsize=1)(self._make_order)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self._length

    def __iter__(self) -> Generator[dict[str, Array], None, None]:
        """The batches from here on; close it to end its thread early."""
        return self._batches(self._step)

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0 over all epochs.

        Iterators that exist already go on from where they are.

        **Arguments:**

        - `step`: the step. Beyond the last of `epochs`, there are no more batches.

        **Raises:**

        `ValueError` if it is negative.
        """
        if step < 0:
            raise ValueError(f"step {step} is before the start; seek to 0 or a later step.")
        self._step = int(step)

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """Which of the source's examples make up the batch of a step.

        **Arguments:**

        - `step`: the step, counted from 0.

        **Returns:**

        Their places in the source, in the order of the batch, without padding.
        """
        epoch, batch = divmod(step, self._length)
        start = batch * self._batch_size
        return self._order(epoch)[start : start + self._batch_size]

    def state(self) -> dict[str, Any]:
        """The position, as what JSON can hold, for [`eqxshard.Loader.restore`][].

        **Returns:**

        The step of the next batch that the caller has not had yet (however many are
        prefetched), and a fingerprint of what decides which batch that is.
        """
        return {"step": self._step, "fingerprint": self._fingerprint()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where [`eqxshard.Loader.state`][] was called, in this run or another.

        The mesh and the number of epochs may be others than they were.

        **Arguments:**

        - `state`: what `state` returned.

        **Raises:**

        `ValueError` if it is that of a loader whose batches are others: of another
        source's length, batch size, seed, `shuffle` or `remainder`.
        """
        if (
            not isinstance(state, Mapping)
            or set(state) != {"step", "fingerprint"}
            or not isinstance(state["step"], int)
            or not isinstance(state["fingerprint"], Mapping)
        ):
            raise ValueError(
                f"{state} is not the state of a loader; give what Loader.state() returned."
            )
        here, there = self._fingerprint(), state["fingerprint"]
        differ = [name for name in here if there.get(name) != here[name]]
        if differ:
            says = ", ".join(f"{n} was {there.get(n)!r} and is {here[n]!r}" for n in differ)
            raise ValueError(
                f"the state is of a loader with other batches: {says}; make the loader as "
                "it was, or use seek to go to a step regardless."
            )
        self.seek(state["step"])

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "length": len(self._source),
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "remainder": self._remainder,
        }

    def _batches(self, first: int) -> Generator[dict[str, Array], None, None]:
        with closing(self._host_batches(first)) as host_batches:
            for step, (arrays, examples) in enumerate(host_batches, start=first):
                # Here, as jax.enable_x64 may hold for this thread and not for the other.
                _check_range(arrays)
                batch = {name: self._place(array) for name, array in arrays.items()}
                if self._remainder == "pad" and "weight" not in batch:
                    batch["weight"] = self._weight(examples)
                self._step = step + 1
                yield batch

    def _host_batches(self, first: int) -> Generator[_HostBatch, None, None]:
        if first >= self._stop:
            return
        (batch,) = self._gather(range(first, first + 1))
        threads, together, ahead = min(self._prefetch, 1), 1, self._prefetch
        nbytes = sum(array.nbytes for array in batch.arrays.values())
        if self._prefetch and self._transform is None and 2 * nbytes <= _TOGETHER_BYTES:
            together = min(_TOGETHER_BYTES // max(nbytes, 1), _TOGETHER_BATCHES)
            # Two at least: with one, the thread would wait for us as often as we for it.
            ahead = max(math.ceil(self._prefetch / together), 2)

        def gather(start: int) -> list[_HostBatch]:
            return self._gather(range(start, min(start + together, self._stop)))

        chunks = grain.MapDataset.range(first + 1, self._stop, together).map(gather)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        with closing(iter(chunks.to_iter_dataset(options))) as gathered:
            gathered.start_prefetch()
            yield batch
            yield from itertools.chain.from_iterable(gathered)

    def _gather(self, steps: range) -> list[_HostBatch]:
        """The batches of some steps, from one call of the source's gather."""
        rows = [self.rows(step) for step in steps]
        size = self._batch_size
        padded = np.zeros((len(rows), size), np.int64)
        for i, some in enumerate(rows):
            padded[i, : len(some)] = some
        arrays = self._source.gather(padded.reshape(-1))
        _check_rows("the source's gather", arrays, padded.size)
        return [
            self._host_batch(
                {name: array[i * size : (i + 1) * size] for name, array in arrays.items()},
                len(some),
            )
            for i, some in enumerate(rows)
        ]

    def _host_batch(self, arrays: dict[str, np.ndarray], examples: int) -> _HostBatch:
        size = self._batch_size
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
        if self._remainder == "pad" and "weight" in arrays:
            weight = arrays["weight"]
            if weight.shape != (size,):
                raise ValueError(
                    f"'weight' has shape {weight.shape} for {size} examples; give one "
                    "number for each, or use another name."
                )
            kept = np.where(np.arange(size) < examples, weight, 0)
            arrays = arrays | {"weight": kept.astype(np.float32)}
        return _HostBatch(arrays, examples)

    def _make_order(self, epoch: int) -> Int[np.ndarray, " n"]:
        if not self._shuffle:
            return np.arange(len(self._source))
        # Of NumPy's generators, this is the one whose stream never changes.
        return np.random.RandomState([self._seed, epoch]).permutation(len(self._source))

    def _place(self, array: np.ndarray) -> Array:
        # Gives each device its rows. (device_put takes twice as long.)
        return jax.make_array_from_callback(array.shape, self._sharding, array.__getitem__)

    def _weight(self, examples: int) -> Array:
        if examples < self._batch_size:
            return self._place((np.arange(self._batch_size) < examples).astype(np.float32))
        # Shared by all full batches, until somebody donates one.
        if self._ones is None or self._ones.is_deleted():
            self._ones = self._place(np.ones(self._batch_size, np.float32))
        return self._ones


def _check_source(source: Any) -> None:
    if not isinstance(source, Source):
        raise TypeError(
            f"a {type(source).__name__} is not a source; give something with __len__() and "
            "gather(indices), such as eqxshard.data.ArraySource({'x': x, 'y': y})."
        )
    if len(source) == 0:
        raise ValueError("the source is empty; give one with at least one example.")


def _check_remainder(remainder: str, length: int, batch_size: int) -> None:
    if remainder not in ("pad", "drop", "error"):
        raise ValueError(
            f"remainder={remainder!r} is not known; use 'pad', 'drop' or 'error'."
        )
    left = length % batch_size
    if remainder == "error" and left:
        raise ValueError(
            f"batches of {batch_size} leave {left} of {length} examples over; use a batch "
            "size that divides, or remainder='pad' or 'drop'."
        )
    if remainder == "drop" and length < batch_size:
        raise ValueError(
            f"the source has {length} examples, less than one batch of {batch_size}, and "
            "remainder='drop' leaves nothing; use a smaller batch size or remainder='pad'."
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


def _check_range(arrays: Mapping[str, np.ndarray]) -> None:
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
