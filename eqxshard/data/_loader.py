"""The loader: from a source on the host to sharded batches on their devices.

Glossary:

- a *row* is an example's index in the source;
- a *batch* is counted within its epoch, from 0 to `len(loader) - 1`;
- a *step* counts batches from the start of the first epoch, without end. It is the whole
  position of a loader. While the batch size is the same, `epoch, batch =
  divmod(step, len(loader))`; `_steps.py` has the rest.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from .._errors import UsageError, UsageTypeError
from ..distributed import assert_same_on_all_processes, spans_processes
from ..sharding._batch_weights import WEIGHT
from ..sharding._leaves import check_integers
from ..sharding._mesh import batch_sharding, check_batch_size, check_is_mesh
from ._buckets import BucketBatch, Buckets
from ._entries import FirstEntries
from ._host import HostBatches, Transform
from ._pipeline import (
    checked_step,
    gather_ahead,
    place_rows,
    positions_on_this_process,
)
from ._resident import DeviceBatches, ResidentDataset
from ._samplers import Order, Sampler, digest
from ._sources import Source, check_source
from ._steps import Steps

Remainder = Literal["pad", "drop", "error"]
Placement = Literal["host", "device"]


class Loader:
    """Makes batches of a source's examples, and places them on a mesh.

    Iterating gives dicts of global `jax.Array`s, their rows split over the mesh's `data`
    and `fsdp` axes, starting at the loader's position. It never ends, unless `epochs` says
    when: for a `for` loop over one pass, give `epochs=1`. Each device gets its own rows
    only. Batches are gathered ahead in a [Grain](https://google-grain.readthedocs.io)
    thread, which ends when the iterator is closed or dropped.

    The order of the examples is a function of `seed` and the epoch alone, so it is the
    same on any number of devices, and a batch is a function of its step. No batch mixes
    epochs, and without a `sampler` no example comes twice in an epoch.

    Several iterators of one loader are independent: each starts at the loader's position
    when it is made, and the loader's position is that of the last one to advance: of the
    batch after the one that it gave, whatever was gathered ahead.

    **Arguments:**

    - `source`: an [`eqxshard.data.Source`][], such as [`eqxshard.data.ArraySource`][].
    - `batch_size`: the number of rows of a batch, over all devices.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `seed`: decides the order of each epoch.
    - `shuffle`: whether to shuffle; otherwise every epoch is in the order of the source.
    - `sampler`: an [`eqxshard.data.Sampler`][], which chooses the examples of each epoch
        and their order instead. The number of batches in an epoch follows its length.
    - `epochs`: the number of epochs, counted from step 0; endless by default. Iterating
        again after the last one gives nothing, with a warning, until `seek(0)`.
    - `remainder`: what to do with the last examples of an epoch if `batch_size` does not
        divide its length. `"pad"` fills the batch up with rows of weight 0, and gives
        every batch a float32 entry `"__weight__"` (if the source has one, padding sets it
        to 0); `"drop"` leaves the examples out; `"error"` raises at once. If it divides,
        no batch gets a `"__weight__"`.
    - `transform`: called with a dict of NumPy arrays, the rows of a batch that this
        process holds; returns one with the same number of rows. It may write into the
        arrays that it gets, and use its own again. It runs in the loader's thread, or in
        its workers. An [`eqxshard.data.RandomTransform`][] also gets a random generator
        for each row.
    - `prefetch`: how many batches to gather ahead. Small batches are gathered several at
        a time if there is no `transform`, so a few more may be. With 0, each batch is
        gathered on demand, without a thread.
    - `workers`: the number of worker processes that gather and transform batches instead
        of the thread, for sources and transforms that spend their time in Python. The
        source and the transform are pickled for them (so a script that uses workers keeps
        its work below `if __name__ == "__main__":`).
    - `placement`: `"host"` gathers batches on the host; `"device"` puts the whole dataset
        on every device once, for datasets that fit. The batches are the same, but are
        gathered on the devices, and [`eqxshard.fit`][] and [`eqxshard.evaluate`][] take
        many steps in one dispatch ([`eqxshard.Loader.stacked`][]). It excludes
        `transform` and `workers`, and ignores `prefetch`.

    **Raises:**

    `TypeError` if `source` or `sampler` lacks a method, or `batch_size` or `seed` is not an
    integer; `ValueError` if the source is empty, the sampler does not suit it,
    `batch_size` does not divide over the mesh or does not suit the source (see
    `remainder`), another number is out of range, or `placement="device"` is not possible.
    While iterating (or at once, with `placement="device"`), `ValueError` if the source or
    the transform returns the wrong number of rows, other entries, shapes or dtypes than
    for the first batch, or integers that need 64 bits where JAX has 32; `TypeError` if it
    returns what devices cannot hold; and whatever they raise themselves (of a
    `StopIteration`, a `RuntimeError`).

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
        sampler: Sampler | None = None,
        epochs: int | None = None,
        remainder: Remainder = "pad",
        transform: Transform | None = None,
        prefetch: int = 2,
        workers: int = 0,
        placement: Placement = "host",
    ):
        check_source(source)
        check_is_mesh(mesh)
        if not isinstance(sampler, Sampler | None):
            raise UsageTypeError(
                f"a {type(sampler).__name__} is not a sampler; give something with "
                "__len__() and rows(examples, seed, epoch)."
            )
        # Python's own integers, also if NumPy's were given: state() must be JSON.
        batch_size, seed = operator.index(batch_size), operator.index(seed)
        _check_numbers(seed, epochs, prefetch, workers)
        if sampler is not None and not shuffle:
            raise UsageError(
                "shuffle=False has no meaning with a sampler, which decides the order; "
                "leave it out."
            )
        order = Order(len(source), seed=seed, shuffle=shuffle, sampler=sampler)
        self._fingerprint = {
            "length": len(source),
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "sampler": None if sampler is None else digest(order.rows(0, 0, len(order))),
            "remainder": remainder,
        }
        self._spans_processes = spans_processes(mesh.devices.flat)
        if self._spans_processes:
            assert_same_on_all_processes("loader", self._fingerprint)
        check_batch_size(batch_size, mesh)
        # Only now, because it may be empty in one process alone.
        _check_remainder(remainder, order, batch_size)
        _check_placement(placement, transform, workers, sampler)
        self._sharding = sharding = batch_sharding(mesh)
        self._host = HostBatches(
            source,
            order,
            order.steps((0, batch_size), fills=remainder == "pad"),
            transform=transform,
            positions=positions_on_this_process(sharding, batch_size),
        )
        self._resident = None
        if placement == "device":
            self._resident = ResidentDataset(self._host, mesh)
        self._place = functools.partial(
            place_rows,
            sharding=sharding,
            positions=self._host.positions,
            batch_size=batch_size,
        )
        self._prefetch, self._workers = prefetch, workers
        self._full_weight: Array | None = None
        self._first = FirstEntries(
            "return the same entries of the same shapes and dtypes for all batches, from "
            "the source and the transform"
        )
        self._epochs = epochs
        self._rebatched = False
        self._step = 0

    @property
    def placement(self) -> Placement:
        """Where the dataset is: `"host"` or `"device"`."""
        return "host" if self._resident is None else "device"

    def __len__(self) -> int:
        """The number of batches in an epoch, if the batch size does not change in it."""
        return self._host.length

    @property
    def steps(self) -> Steps:
        """Which epoch each step is in, for [`eqxshard.fit`][]."""
        return self._host.steps

    @property
    def _stop(self) -> int:
        """The step after the last one."""
        return sys.maxsize if self._epochs is None else self.steps.end(self._epochs)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes, dtypes and shardings of a batch; reads one example."""
        # Without its sharding, a step that is lowered for a batch would be traced again
        # when it is called.
        return self._host.shapes(self._sharding)

    def __iter__(self) -> Generator[dict[str, Array], None, None]:
        """The batches from the loader's position on; close it to end its thread early."""
        if self._step >= self._stop:
            warnings.warn(
                f"this loader gives no more batches: it is at step {self._step}, and its "
                f"epochs= end at step {self._stop}; make it without epochs=, and loop over "
                "itertools.islice(loader, len(loader)) for one epoch after the other, each "
                "in a new order, or call loader.seek(0) for the same batches again.",
                stacklevel=2,
            )
        return self._batches(self._step)

    def _batches(self, first: int) -> Generator[dict[str, Array], None, None]:
        steps = range(first, self._stop)
        made = self._resident.batches(steps) if self._resident else self._placed(steps)
        with closing(made) as batches:
            for step, batch in enumerate(batches, start=first):
                self._step = step + 1
                yield batch

    def _placed(self, steps: range) -> Generator[dict[str, Array], None, None]:
        """The batches of some steps, gathered on the host and placed on the devices."""
        chunks = gather_ahead(
            self._host, steps, prefetch=self._prefetch, workers=self._workers
        )
        with closing(chunks):
            for step, arrays in zip(steps, itertools.chain.from_iterable(chunks)):
                # Here and not ahead, as jax.enable_x64 may hold for this thread only.
                check_integers(arrays)
                length, entries = self._host.padded_length(step), arrays
                if self._host.pads and WEIGHT in arrays:
                    # Full batches have none yet.
                    entries = {n: x for n, x in arrays.items() if n != WEIGHT}
                self._first.check(entries, step, length)
                batch = {name: self._place(array) for name, array in arrays.items()}
                if self._host.pads and WEIGHT not in batch:
                    # One for all full batches, until somebody donates it.
                    if self._full_weight is None or self._full_weight.is_deleted():
                        ones = np.ones(len(self._host.positions), np.float32)
                        self._full_weight = self._place(ones)
                    batch[WEIGHT] = self._full_weight
                yield batch if length is None else BucketBatch(batch, length)

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0 over all epochs.

        Iterators that exist already are not affected.

        **Arguments:**

        - `step`: the step. Beyond the last of `epochs`, there are no more batches.

        **Raises:**

        `ValueError` if it is negative, or before the batch size last changed.
        """
        step, changed = checked_step(step), self.steps.last.first
        if step < changed:
            raise UsageError(
                f"step {step} is before step {changed}, from which on this loader has "
                f"batches of {self.steps.last.size}; make another loader with the batch "
                "size of that step."
            )
        self._step = step

    def stacked(self, count: int, *, capacity: int | None = None) -> DeviceBatches:
        """The next batches, for `train_step.many` or `eval_step.many` to gather.

        Needs `placement="device"`. Only row numbers are sent to the devices.

        **Arguments:**

        - `count`: how many batches.
        - `capacity`: the number of batches to leave room for, `count` by default. Steps
            compile once for each capacity, whatever the count; metrics have an entry for
            each batch that there is room for, of weight 0 if no step was taken.

        **Returns:**

        The batches, as [`eqxshard.training.TrainStep.many`][] takes them.

        **Raises:**

        `ValueError` if the dataset is on the host, fewer batches are left, or `count` is
        more than the capacity.
        """
        capacity = count if capacity is None else capacity
        if self._resident is None:
            raise UsageError(
                "this loader's dataset is on the host; make it with placement='device'."
            )
        left = self._stop - self._step
        if not 1 <= count <= min(capacity, left):
            raise UsageError(
                f"{count} batches were asked for, capacity={capacity} and {left} are left; "
                "ask for at least 1 and no more than these, or make the loader with more "
                "epochs."
            )
        steps = range(self._step, self._step + count)
        self._step += count
        return self._resident.stacked(steps, capacity=capacity)

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The examples that the batch of a step is made of.

        **Arguments:**

        - `step`: the step, counted from 0.

        **Returns:**

        Their indices in the source, in the order of the batch, without padding.
        """
        return self._host.rows(step)

    def state(self) -> dict[str, Any]:
        """The position, as JSON values, for [`eqxshard.Loader.restore`][].

        **Returns:**

        The step of the next batch (not counting prefetched ones), a fingerprint of the
        settings that decide which batch that is, and from which step on there was which
        batch size.
        """
        return {
            "step": self._step,
            "fingerprint": dict(self._fingerprint),
            "batch_sizes": [[*pair] for pair in self.steps.sizes],
        }

    def restore(self, state: Mapping[str, Any], *, rebatch: bool = False) -> None:
        """Go to the position where [`eqxshard.Loader.state`][] was called.

        The mesh and the number of epochs may have changed since.

        **Arguments:**

        - `state`: what `state` returned.
        - `rebatch`: whether the batch size may have changed, too. The loader then goes on
            with the example that would have come next, and makes batches of its own size
            from there on: the order stays as it was, and each epoch still has each
            example once. Later states remember it, and are restored without `rebatch`.
            (All processes call this together.)

        **Raises:**

        `ValueError` if it belongs to a loader with other batches: of another source
        length, batch size, seed, `shuffle`, `sampler` or `remainder`; or if, with
        `remainder="error"`, the new batch size does not divide the rest of the epoch.
        """
        step, theirs = state.get("step"), state.get("fingerprint")
        sizes = _sizes(state)
        if not isinstance(step, int) or not isinstance(theirs, Mapping) or not sizes:
            raise UsageError(
                f"{state} is not the state of a loader; give what Loader.state() returned."
            )
        size, fills = self.steps.last.size, self.steps.last.fills
        _check_same(self._fingerprint, theirs, but_for_size=rebatch or self._rebatched)
        moved = self._host.order.steps(*sizes, (step, size), fills=fills)
        # One that was moved there with `rebatch` stays, as `fit` restores it once more.
        was_moved = self._rebatched and moved == self.steps
        _check_same(self._fingerprint, theirs, but_for_size=rebatch or was_moved)
        if rebatch and self._spans_processes:
            assert_same_on_all_processes("loader", {"batch_sizes": moved.sizes})
        if self._host.buckets is not None and moved.last.start:
            raise UsageError(
                "which examples of sampler=Buckets(...) make up a batch depends on the "
                "batch size, so this can only change between epochs, and step "
                f"{step} is within one; go on from the end of an epoch."
            )
        if self._fingerprint["remainder"] == "error" and moved.last.remainder:
            raise UsageError(
                f"batches of {size} leave {moved.last.remainder} examples of epoch "
                f"{moved.last.epoch} over, which goes on at step {step}; use a batch size "
                "that divides the rest of it, or go on from the end of an epoch."
            )
        self._rebatched = rebatch or was_moved
        self._host = dataclasses.replace(self._host, steps=moved)
        if self._resident is not None:
            self._resident.host = self._host
        self.seek(step)


def _check_same(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], *, but_for_size: bool
) -> None:
    """Raise `ValueError` if two fingerprints differ (other than by the batch size)."""
    differ = [name for name in ours if theirs.get(name) != ours[name]]
    differ = [name for name in differ if not (but_for_size and name == "batch_size")]
    if not differ:
        return
    changes = (f"{name} was {theirs.get(name)!r} and is {ours[name]!r}" for name in differ)
    remedy = "make the loader as it was, or start a new run"
    if differ == ["batch_size"]:
        remedy = (
            "make the loader as it was, or go on from the same example with "
            "loader.restore(state, rebatch=True)"
        )
    raise UsageError(
        f"the state is of a loader with other batches: {', '.join(changes)}; {remedy}."
    )


def _sizes(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """From which step on a loader had which batch size; empty if its state is invalid."""
    fingerprint = state.get("fingerprint")
    size = fingerprint.get("batch_size") if isinstance(fingerprint, Mapping) else None
    # States of before it could change have none.
    pairs = state.get("batch_sizes", [[0, size]])
    with contextlib.suppress(TypeError, ValueError):
        sizes = [(operator.index(step), operator.index(size)) for step, size in pairs]
        steps = [step for step, _ in sizes]
        ordered = steps == sorted({*steps}) and steps[:1] == [0]
        if ordered and all(size > 0 for _, size in sizes):
            return sizes
    return []


def _check_numbers(seed: int, epochs: int | None, prefetch: int, workers: int) -> None:
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed={seed} must be between 0 and 2**32 - 1.")
    least = {"epochs": (epochs, 1), "prefetch": (prefetch, 0), "workers": (workers, 0)}
    for name, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise UsageError(f"{name}={value} must be at least {smallest}.")


def _check_placement(
    placement: str, transform: Any, workers: int, sampler: Sampler | None
) -> None:
    if placement not in ("host", "device"):
        raise UsageError(f"placement={placement!r} is not 'host' or 'device'.")
    if placement == "device" and (transform is not None or workers):
        raise UsageError(
            "placement='device' cannot run transform= or workers=, which need the host; do "
            "their work in the loss function or in the source, or use placement='host'."
        )
    if placement == "device" and isinstance(sampler, Buckets):
        raise UsageError(
            "placement='device' gathers batches of one shape, and sampler=Buckets(...) "
            "makes several; use placement='host'."
        )


def _check_remainder(remainder: str, order: Order, batch_size: int) -> None:
    if remainder not in ("pad", "drop", "error"):
        raise UsageError(f"remainder={remainder!r} is not 'pad', 'drop' or 'error'.")
    length = len(order)
    if length == 0:
        raise UsageError("an epoch has no examples; give a source and sampler with some.")
    buckets = order.sampler if isinstance(order.sampler, Buckets) else None
    left = length % batch_size
    if buckets is not None:
        left = int(buckets.left_over(batch_size).sum())
    if remainder == "error" and left:
        raise UsageError(
            f"batches of {batch_size} leave {left} of {length} examples over; use a batch "
            "size that divides, or remainder='pad' or 'drop'."
        )
    if remainder == "drop" and left == length:
        raise UsageError(
            f"an epoch has {length} examples, less than one batch of {batch_size}"
            f"{' in each bucket' if buckets else ''}, and remainder='drop' drops them "
            "all; use a smaller batch size or remainder='pad'."
        )
