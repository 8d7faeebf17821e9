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
from typing import Any, Literal

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from .._batches import DeviceBatches
from ..distributed import agree, is_shared
from ..mesh import batch_sharding, check_batch_size
from ._host import Chunks, HostBatch, HostBatches
from ._sources import Source

Remainder = Literal["pad", "drop", "error"]
Placement = Literal["host", "device"]

#: Handing something from one thread to another costs as much as gathering a batch of
#: small images, so batches are gathered and handed over together while they are small.
_TOGETHER_BYTES = 2**21
_TOGETHER_BATCHES = 16


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
    - `transform`: called with a dict of NumPy arrays, all the rows of a batch that this
        process holds, returns one with as many rows, which is not to change afterwards.
        It runs in the loader's thread, or in its workers.
    - `prefetch`: how many batches to gather ahead. Without a `transform`, batches of up
        to one mebibyte are gathered some at a time, so that a few more may be. With
        0, each is gathered when it is asked for, without a thread.
    - `workers`: how many processes of their own to gather and transform batches in: for
        sources and transforms whose work is done in Python, which one process does in one
        thread at a time. The source and the transform are sent to them (so a script that
        makes a loader keeps its work below `if __name__ == "__main__":`).
    - `placement`: where the examples wait for their step. On the `"host"`; or, for a
        dataset that fits, all of them on every `"device"`, put there once. Batches are
        then the same, but are gathered on the devices, and [`eqxshard.fit`][] and
        [`eqxshard.evaluate`][] take many steps in one dispatch
        ([`eqxshard.Loader.stacked`][]). There is nothing to transform, to prefetch or to
        work on then.

    **Raises:**

    `TypeError` if `source` is not a source, or `batch_size` or `seed` is not an integer;
    `ValueError` if the source is empty, if `batch_size` does not divide over the mesh or
    (see `remainder`) does not suit the source, if another number is not one that makes
    sense, or if `placement="device"` is asked for and the source does not fit there or is
    to be transformed on the host. While iterating (or, with `placement="device"`, at
    once), `ValueError` if the source or the transform returns another number of rows than
    it should, or integers that need 64 bits where JAX has 32, `TypeError` if it returns
    what no device can hold, and whatever they raise themselves.

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
        workers: int = 0,
        placement: Placement = "host",
    ):
        _check_source(source)
        # Python's integers, also where NumPy's came: state() is for JSON.
        batch_size, seed = operator.index(batch_size), operator.index(seed)
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._remainder = remainder
        if is_shared(mesh.devices.flat):
            agree("loader", self._fingerprint(len(source)))
        check_batch_size(batch_size, mesh)
        if len(source) == 0:
            raise ValueError("the source is empty; give one with at least one example.")
        _check_remainder(remainder, len(source), batch_size)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} is not a seed; use 0 to 2**32 - 1.")
        if epochs is not None and epochs < 1:
            raise ValueError(
                f"epochs={epochs} is not a number of epochs; use 1 or more, or None for no "
                "end."
            )
        for name, value, of in (
            ("prefetch", prefetch, "batches"),
            ("workers", workers, "processes"),
        ):
            if value < 0:
                raise ValueError(f"{name}={value} is not a number of {of}; use 0 or more.")
        if placement not in ("host", "device"):
            raise ValueError(f"placement={placement!r} is not 'host' or 'device'.")
        if placement == "device" and (transform is not None or workers):
            raise ValueError(
                "placement='device' has no host to run transform= or workers= on; do what "
                "they do in the loss function or in the source, or use placement='host'."
            )
        #: Where the examples are: `"host"` or `"device"`.
        self.placement = placement
        self._transforms = transform is not None
        self._prefetch = prefetch
        self._workers = workers
        self._sharding = batch_sharding(mesh)
        self._host = HostBatches(
            source,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            pads=remainder == "pad",
            transform=transform,
            places=_places(self._sharding, batch_size),
        )
        self._stop = sys.maxsize if epochs is None else epochs * len(self)
        self._step = 0
        self._ones: Array | None = None
        if placement == "device":
            self._examples = self._put_examples()

            def one(batches: DeviceBatches) -> dict[str, Array]:
                return batches.batch(jax.numpy.int32(0), mesh)

            self._gather = jax.jit(one, out_shardings=self._sharding)

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self._host.length

    def __iter__(self) -> Generator[dict[str, Array], None, None]:
        """The batches from here on; close it to end its thread early."""
        if self.placement == "device":
            return self._device_batches(self._step)
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

    def stacked(self, count: int, *, room: int | None = None) -> DeviceBatches:
        """The next batches, for `train_step.many` or `eval_step.many` to gather itself.

        Only for `placement="device"`: what is sent there is which rows each step takes.

        **Arguments:**

        - `count`: how many batches, of those left of `epochs`.
        - `room`: how many there is room for. Steps compile once for each room, whatever
            the count; by default it is the count. Metrics have an entry for each there is
            room for, with a weight of 0 where no step was taken.

        **Returns:**

        The batches, as [`eqxshard.TrainStep.many`][] takes them.

        **Raises:**

        `ValueError` if the examples are on the host, if so many are not left, or if there
        is no room for them.
        """
        room = count if room is None else room
        if self.placement != "device":
            raise ValueError(
                "this loader's examples are on the host; make it with placement='device'."
            )
        if not 1 <= count <= room:
            raise ValueError(
                f"{count} batches cannot be stacked with room for {room}; give a count of "
                "1 or more, and no less room."
            )
        if count > self._stop - self._step:
            raise ValueError(
                f"{self._stop - self._step} batches are left, and {count} were asked for; "
                "ask for fewer, or make the loader with more epochs."
            )
        batches = self._indexed(range(self._step, self._step + count), room)
        self._step += count
        return batches

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """Which of the source's examples make up the batch of a step.

        **Arguments:**

        - `step`: the step, counted from 0.

        **Returns:**

        Their places in the source, in the order of the batch, without padding.
        """
        return self._host.rows(step)

    def state(self) -> dict[str, Any]:
        """The position, as what JSON can hold, for [`eqxshard.Loader.restore`][].

        **Returns:**

        The step of the next batch that the caller has not had yet (however many are
        prefetched), and a fingerprint of what decides which batch that is.
        """
        return {
            "step": self._step,
            "fingerprint": self._fingerprint(len(self._host.source)),
        }

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
        here = self._fingerprint(len(self._host.source))
        there = state["fingerprint"]
        differ = [name for name in here if there.get(name) != here[name]]
        if differ:
            says = ", ".join(f"{n} was {there.get(n)!r} and is {here[n]!r}" for n in differ)
            raise ValueError(
                f"the state is of a loader with other batches: {says}; make the loader as "
                "it was, or use seek to go to a step regardless."
            )
        self.seek(state["step"])

    def _fingerprint(self, length: int) -> dict[str, Any]:
        return {
            "length": length,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "remainder": self._remainder,
        }

    def _batches(self, first: int) -> Generator[dict[str, Array], None, None]:
        with closing(self._host_batches(first)) as host_batches:
            for step, (arrays, real) in enumerate(host_batches, start=first):
                # Here, as jax.enable_x64 may hold for this thread and not for the other.
                _check_range(arrays)
                batch = {name: self._place(array) for name, array in arrays.items()}
                if self._remainder == "pad" and "weight" not in batch:
                    batch["weight"] = self._weight(real)
                self._step = step + 1
                yield batch

    def _device_batches(self, first: int) -> Generator[dict[str, Array], None, None]:
        for step in range(first, self._stop):
            batch = self._gather(self._indexed(range(step, step + 1), 1))
            self._step = step + 1
            yield batch

    def _indexed(self, steps: range, room: int) -> DeviceBatches:
        padded, real = self._host.padded(steps, np.arange(self._batch_size))
        sharding = NamedSharding(
            self._sharding.mesh, PartitionSpec(None, *self._sharding.spec)
        )

        def put(array: np.ndarray, dtype: Any) -> Array:
            filled = np.zeros((room, self._batch_size), dtype)
            filled[: len(array)] = array
            return jax.make_array_from_callback(filled.shape, sharding, filled.__getitem__)

        weight = put(real, np.float32) if self._remainder == "pad" else None
        rows = put(padded, np.int32)
        return DeviceBatches(self._examples, rows, weight, np.array(len(steps), np.int32))

    def _put_examples(self) -> dict[str, Array]:
        arrays = self._host.everything()
        _check_range(arrays)
        mesh = self._sharding.mesh
        nbytes = sum(array.nbytes for array in arrays.values())
        for device in mesh.local_devices or ():
            _check_room(nbytes, device.memory_stats() or {})
        whole = NamedSharding(mesh, PartitionSpec())
        return {
            name: jax.make_array_from_callback(array.shape, whole, array.__getitem__)
            for name, array in arrays.items()
        }

    def _host_batches(self, first: int) -> Generator[HostBatch, None, None]:
        if first >= self._stop:
            return
        (batch,) = self._host.gather(range(first, first + 1))
        threads, together, ahead = min(self._prefetch, 1), 1, self._prefetch
        nbytes = sum(array.nbytes for array in batch.arrays.values())
        small = 2 * nbytes <= _TOGETHER_BYTES
        if self._prefetch and small and not (self._transforms or self._workers):
            together = min(_TOGETHER_BYTES // max(nbytes, 1), _TOGETHER_BATCHES)
            # Two at least: with one, the thread would wait for us as often as we for it.
            ahead = max(math.ceil(self._prefetch / together), 2)
        chunks = grain.MapDataset.range(first + 1, self._stop, together).map(
            Chunks(self._host, together, self._stop)
        )
        if self._workers:
            # Grain asks absl for flags, which only programs of absl's have parsed.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            dataset = chunks.to_iter_dataset(grain.ReadOptions(num_threads=0)).mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=self._workers,
                    per_worker_buffer_size=max(math.ceil(ahead / self._workers), 1),
                )
            )
        else:
            dataset = chunks.to_iter_dataset(
                grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
            )
        with closing(iter(dataset)) as gathered:
            gathered.start_prefetch()
            yield batch
            yield from itertools.chain.from_iterable(gathered)

    def _place(self, array: np.ndarray) -> Array:
        # Gives each device its rows, of which this process holds those of its own.
        # (device_put takes twice as long.)
        shape = (self._batch_size, *array.shape[1:])
        if len(array) == self._batch_size:
            return jax.make_array_from_callback(shape, self._sharding, array.__getitem__)
        places = self._host.places

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self._batch_size)
            return array[slice(*np.searchsorted(places, (start, stop)))]

        return jax.make_array_from_callback(shape, self._sharding, part)

    def _weight(self, real: np.ndarray) -> Array:
        if not real.all():
            return self._place(real.astype(np.float32))
        # Shared by all full batches, until somebody donates one.
        if self._ones is None or self._ones.is_deleted():
            self._ones = self._place(real.astype(np.float32))
        return self._ones


def _places(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """Which rows of a batch lie on devices of this process, in order."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = [range(batch_size)[index[0]] for index in indices if index is not None]
    if not rows:
        raise ValueError(
            "this process has no device of the mesh, and so no part of a batch; make the "
            "mesh of devices of all processes."
        )
    return np.unique(np.concatenate(rows))


def _check_source(source: Any) -> None:
    if not isinstance(source, Source):
        raise TypeError(
            f"a {type(source).__name__} is not a source; give something with __len__() and "
            "gather(indices), such as eqxshard.data.ArraySource({'x': x, 'y': y})."
        )


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


def _check_room(nbytes: int, memory: Mapping[str, int]) -> None:
    """Raise `ValueError` if a device (CPUs do not say) has no room for the examples."""
    free = memory.get("bytes_limit", sys.maxsize) - memory.get("bytes_in_use", 0)
    if nbytes > free:
        raise ValueError(
            f"the source's {nbytes / 2**30:.1f} GiB do not fit on a device that has "
            f"{free / 2**30:.1f} GiB free; use placement='host'."
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
