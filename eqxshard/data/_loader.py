"""The loader: batches from the host, placed on a mesh, with a position.

`_batches.py` makes the batches, or `_stream.py` takes those that others make. *Row*,
*place* and *step* are explained in `_order.py`.
"""

import atexit
import contextlib
import dataclasses
import operator
import sys
import warnings
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from .._errors import UsageError, UsageTypeError
from ..distributed import (
    allgather_json,
    assert_same_on_all_processes,
    broadcast_from_first,
    is_main_process,
    spans_processes,
)
from ..sharding._batch_weights import WEIGHT, check_weights
from ..sharding._leaves import check_integers
from ..sharding._mesh import batch_sharding, check_batch_size, check_is_mesh
from ..sharding._placement import from_host
from ..training._inputs import DeviceBatches
from ._batches import (
    Arrays,
    ExampleBatches,
    Reading,
    Transform,
    check_remainder,
    digest_of_first,
    make_examples,
    parts_of,
    whole_shapes,
)
from ._entries import FirstEntries
from ._options import check_numbers, check_order, check_placement, check_reading
from ._order import Sampler, Steps
from ._resident import ResidentDataset
from ._sources import Source, check_batches, is_iter_dataset, is_map_dataset
from ._stream import BatchStream, Mark, raise_in_all

Remainder = Literal["pad", "drop", "error"]
Placement = Literal["host", "device"]

#: Open iterators, closed at exit: later, Grain's threads can no longer be ended.
_ITERATORS: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


class Loader:
    """Makes batches of examples, or takes batches as they come, and places them on a mesh.

    Iterating gives dicts of global `jax.Array`s, their rows split over the mesh's `data`
    and `fsdp` axes, starting at the loader's position. Each device gets its own rows only.
    [Grain](https://google-grain.readthedocs.io) reads batches ahead in threads, which end
    when the iterator is closed or dropped.

    There are three kinds of `source`:

    - *Arrays*, with `batch_size`: a dict of arrays, or an [`eqxshard.data.Source`][]. The
        order of the examples is a function of `seed` and the epoch alone. No batch mixes
        epochs, and without a `sampler` no example comes twice in an epoch.
    - *A `grain.MapDataset` of examples*, with `batch_size`: dicts of arrays and numbers,
        shuffled, mixed and mapped by Grain. Each process reads the examples of its own
        devices. Endless after `.repeat()`.
    - *Batches*, without `batch_size`: a `grain.MapDataset` or `grain.IterDataset` after
        `.batch(n)`, a `grain.DataLoader`, or any iterable of dicts of arrays, such as
        PyTorch's `DataLoader`. With several processes, each gives the rows of its own
        devices: of a batch of 256 on two processes, 128. If it has a `len()`, that is an
        epoch, and it is read again after each; otherwise the loader ends with it.

    For the first two, the batches are the same on any mesh and any number of processes, and
    the position is a number of examples. For the third, the position is the state of each
    process's iterator, from its `get_state()`, which Grain's iterators have; an iterator
    without this method is read again up to the position.

    Except for batches without a length, a loader never ends, unless `epochs` says when: for
    a `for` loop over one pass, give `epochs=1`. Several iterators of one loader are
    independent: each starts at the loader's position when it is made. The loader's position
    is that of the iterator that advanced last: the batch after the one that it gave,
    whatever was read ahead.

    **Arguments:**

    - `source`: as above.
    - `batch_size`: the number of rows of a batch, over all devices. Leave it out if the
        source has batches.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `seed`: decides the order of each epoch of arrays. (Call `.seed(...)` on a dataset of
        Grain's.)
    - `shuffle`: whether to shuffle arrays; otherwise every epoch is in the order of the
        source.
    - `sampler`: an [`eqxshard.data.Sampler`][], which chooses the rows of each epoch of
        arrays and their order instead. The number of batches in an epoch follows its
        length.
    - `epochs`: the number of epochs, counted from step 0; endless by default. Iterating
        again after the last one gives nothing, with a warning, until `seek(0)`.
    - `remainder`: what to do with the last examples of an epoch if `batch_size` does not
        divide its length. `"pad"` fills the batch up with rows of weight 0, and gives
        every batch a float32 entry `"__weight__"` (if the source has one, padding sets it
        to 0); `"drop"` leaves the examples out; `"error"` raises at once. If it divides,
        no batch gets a `"__weight__"`.
    - `transform`: called with a dict of NumPy arrays, the rows of a batch that this
        process holds; returns one with the same number of rows. It may write into the
        arrays that it gets, and use its own again. It runs in Grain's threads or workers,
        one call at a time in each process.
    - `prefetch`: how many batches to read ahead. Small batches of arrays are gathered
        several at a time if there is no `transform`, so a few more may be. A
        `grain.MapDataset` has at least 16 batches read ahead, one by each of 16 threads; a
        `grain.IterDataset` reads ahead by its own options. With 0, each batch is read on
        demand, without a thread.
    - `read_options`: a `grain.ReadOptions` for a `grain.MapDataset`, in place of
        `prefetch`: how many threads read its batches, one each, and how many batches are
        read ahead.
    - `workers`: the number of worker processes that read and transform batches, for
        sources and transforms that spend their time in Python. The source and the transform
        are pickled for them (so a script that uses workers keeps its work below `if
        __name__ == "__main__":`).
    - `placement`: `"host"` gathers batches on the host; `"device"` puts arrays on every
        device once, for datasets that fit. The batches are the same, but are gathered on
        the devices, and [`eqxshard.fit`][] and [`eqxshard.evaluate`][] take many steps in
        one dispatch ([`eqxshard.Loader.stacked`][]). It excludes `transform` and
        `workers`, and ignores `prefetch`.

    **Raises:**

    `TypeError` if `source` or `sampler` is none of these, or `batch_size` or `seed` is not
    an integer; `ValueError` if the source is empty, an option is not for its kind, the
    sampler does not suit it, `batch_size` does not divide over the mesh or does not suit
    the source (see `remainder`), another number is out of range, or `placement="device"`
    is not possible. While iterating (or at once, with `placement="device"`), `ValueError`
    if the source or the transform returns the wrong number of rows, other entries, shapes
    or dtypes than for the first batch, or integers that need 64 bits where JAX has 32, or
    a process has fewer batches than another; `TypeError` if it returns what devices cannot
    hold; and whatever they raise themselves (for a `StopIteration`, a `RuntimeError`).

    !!! Example

        ```python
        loader = eqxshard.Loader({"x": x, "y": y}, batch_size=256, mesh=mesh)
        for batch in loader:
            state, metrics = train_step(state, batch)
        ```
    """

    def __init__(
        self,
        source: Source | Mapping[str, Any] | Iterable[Any],
        *,
        batch_size: int | None = None,
        mesh: Mesh,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Sampler | None = None,
        epochs: int | None = None,
        remainder: Remainder = "pad",
        transform: Transform | None = None,
        prefetch: int = 2,
        read_options: Any = None,
        workers: int = 0,
        placement: Placement = "host",
    ):
        check_is_mesh(mesh)
        check_numbers(seed, epochs, prefetch, workers)
        check_order(source, batch_size, seed, shuffle, sampler, remainder)
        check_reading(source, read_options, workers)
        is_arrays = batch_size is not None and not is_map_dataset(source)
        check_placement(placement, is_arrays, transform, workers)
        self._sharding = batch_sharding(mesh)
        self._mesh = mesh
        self._spans_processes = spans_processes(mesh.devices.flat)
        self._reading = Reading(prefetch, read_options, workers)
        self._examples: ExampleBatches | None = None
        self._stream: BatchStream | None = None
        self._resident: ResidentDataset | None = None
        #: The rows of a batch over all processes, and the positions that are held here.
        self._size: int | None = None
        self._positions = np.arange(0)
        self._expected_size: int | None = None
        if batch_size is None:
            check_batches(source)
            self._stream = BatchStream(
                source, self._reading, transform, self._spans_processes
            )
            self._fingerprint: dict[str, Any] = {"processes": jax.process_count()}
            if is_iter_dataset(source):
                # Each worker has a part of the dataset, and a position in it.
                self._fingerprint["workers"] = workers
            self._assert_same({"length": self._stream.length, "epochs": epochs})
        else:
            # Python's own integers, even if NumPy's were given: state() must be JSON.
            size = operator.index(batch_size)
            check_batch_size(size, mesh)
            examples, self._fingerprint = make_examples(
                source,
                size,
                transform=transform,
                remainder=remainder,
                seed=operator.index(seed),
                shuffle=shuffle,
                sampler=sampler,
            )
            self._assert_same({**self._fingerprint, "batch_size": size, "epochs": epochs})
            # After the comparison, because the source may be empty in one process only.
            endless = self._fingerprint["length"] is None
            check_remainder(remainder, examples, endless)
            if is_map_dataset(source):
                self._check_is_whole(source)
                # Grain does not tell the seeds of a dataset.
                self._fingerprint["first"] = self._digest_of_first(source)
            self._hold(size)
            self._examples = dataclasses.replace(examples, positions=self._positions)
        if placement == "device":
            assert self._examples is not None
            self._resident = ResidentDataset(
                self._examples, self._fingerprint["length"], mesh
            )
        self._full_weight: Array | None = None
        self._first = FirstEntries(
            "give all batches the same entries, shapes and dtypes; drop the last one of an "
            f"epoch (drop_remainder=True), or pad it with rows whose {WEIGHT!r} is 0"
            if self._examples is None
            else "return the same entries of the same shapes and dtypes for all batches, "
            "from the source and the transform"
        )
        self._epochs = epochs
        if epochs is not None and self.steps is None:
            raise UsageError(
                f"epochs={epochs} is for datasets that have a length, and this one has "
                "none; leave epochs= out, and say in the dataset where it ends."
            )
        self._step = 0

    def _assert_same(self, facts: dict[str, Any]) -> None:
        if self._spans_processes:
            assert_same_on_all_processes("loader", facts)

    def _check_is_whole(self, dataset: Any) -> None:
        """Refuse a dataset that is not the same in all processes."""
        if not self._spans_processes:
            return
        # Without the names of functions, which have paths: these may differ.
        parts = [str(part).partition("(transform=")[0] for part in parts_of(dataset)]
        if any(theirs != parts for theirs in allgather_json(parts)):
            raise UsageError(
                "the dataset is not the same in all processes; give each of them the whole "
                "of it, of which the loader reads the rows of its devices, or call "
                ".batch(n) on the parts, and leave batch_size= out."
            )

    def _digest_of_first(self, dataset: Any) -> str:
        """The digest of a dataset's first example, which process 0 reads for all."""
        if not self._spans_processes:
            return digest_of_first(dataset)
        digest, failure = None, None
        if is_main_process():
            try:
                digest = digest_of_first(dataset)
            except Exception as error:
                failure = error
        digest, text = broadcast_from_first([digest, failure and repr(failure)])
        raise_in_all(failure, [text])
        return digest

    def _hold(self, size: int) -> None:
        """Place batches of `size` rows from now on."""
        self._size = size
        self._positions = positions_on_this_process(self._sharding, size)

    @property
    def placement(self) -> Placement:
        """Where the dataset is: `"host"` or `"device"`."""
        return "host" if self._resident is None else "device"

    @property
    def has_rows(self) -> bool:
        """True if the examples have indices, which `rows` returns."""
        return self._examples is not None

    @property
    def has_end(self) -> bool:
        """True unless the dataset says that it is endless."""
        return self.steps is not None or (
            self._stream is not None and not self._stream.is_endless
        )

    def __len__(self) -> int:
        """The number of batches in an epoch, if the batch size does not change in it.

        **Raises:**

        `TypeError` if the dataset is endless, or does not say how long it is.
        """
        if self.steps is None:
            raise UsageTypeError(
                "this loader has no length, because its dataset is endless or does not say "
                "how long it is; give a number of steps."
            )
        return self.steps.each

    @property
    def steps(self) -> Steps | None:
        """Which epoch each step is in, for [`eqxshard.fit`][]; `None` without epochs."""
        if self._examples is not None:
            has_length = self._fingerprint["length"] is not None
            return self._examples.steps if has_length else None
        assert self._stream is not None
        # As if each batch were one example.
        return Steps(1, self._stream.length) if self._stream.length else None

    @property
    def _stop(self) -> int:
        """The step after the last one."""
        if self._epochs is None or self.steps is None:
            return sys.maxsize
        return self.steps.end(self._epochs)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes, dtypes and shardings of a batch; reads one example, or a batch."""
        # Without its sharding, a step that is lowered for a batch would be traced again
        # when it is called.
        if self._examples is not None:
            return self._examples.shapes(self._sharding)
        assert self._stream is not None
        arrays = self._stream.first()
        return whole_shapes(arrays, self._rows_of(arrays), self._sharding)

    def __iter__(self) -> Generator[dict[str, Array], None, None]:
        """The batches from the loader's position on; close it to end its threads early."""
        if self._step >= self._stop:
            warnings.warn(
                f"this loader gives no more batches: it is at step {self._step}, and its "
                f"epochs= end at step {self._stop}; make it without epochs=, and loop over "
                "itertools.islice(loader, len(loader)) for one epoch after the other, each "
                "in a new order, or call loader.seek(0) for the same batches again.",
                stacklevel=2,
            )
        # Now, because the loader may be moved before the first batch is read.
        start = None if self._stream is None else self._stream.nearest(self._step)
        batches = self._batches(range(self._step, self._stop), self._examples, start)
        _ITERATORS.add(batches)
        return batches

    def _batches(
        self, steps: range, examples: ExampleBatches | None, start: Mark | None
    ) -> Generator[dict[str, Array], None, None]:
        made: Any
        if self._resident is not None and examples is not None:
            made = self._resident.batches(examples, steps)
        else:
            made = self._placed(steps, examples, start)
        with closing(made) as batches:
            for step, batch in zip(steps, batches):
                self._step = step + 1
                yield batch

    def _placed(
        self, steps: range, examples: ExampleBatches | None, start: Mark | None
    ) -> Generator[dict[str, Array], None, None]:
        """The batches of some steps, read on the host and placed on the devices."""
        if not steps:
            return
        if examples is not None:
            host: Any = examples.batches(steps, self._reading)
        else:
            assert self._stream is not None and start is not None
            host = self._stream.batches(start, steps.start, self._check)
        pads = examples is not None and examples.pads
        with closing(host):
            for step, arrays in zip(steps, host):
                if examples is not None:
                    # Full batches have no weights yet.
                    entries = arrays
                    if pads and WEIGHT in arrays:
                        entries = {n: x for n, x in arrays.items() if n != WEIGHT}
                    self._check(entries, step)
                elif (rows := self._rows_of(arrays)) != self._size:
                    self._check_rows(rows, self._expected_size)
                    self._hold(rows)
                batch = {name: self._place(array) for name, array in arrays.items()}
                if pads and WEIGHT not in batch:
                    # One for all full batches, until somebody donates it.
                    if self._full_weight is None or self._full_weight.is_deleted():
                        ones = np.ones(len(self._positions), np.float32)
                        self._full_weight = self._place(ones)
                    batch[WEIGHT] = self._full_weight
                yield batch
            if examples is None and self._step == steps.start:
                warnings.warn(
                    "this loader gives no more batches: its dataset ends before that of "
                    f"step {steps.start}; call loader.seek(0) to start again.",
                    stacklevel=2,
                )

    def _check(self, arrays: Arrays, step: int) -> None:
        """Refuse a batch that devices cannot hold, or that is not like the first one."""
        # Not where batches are read ahead: jax.enable_x64 may hold for this thread only.
        check_integers(arrays)
        self._first.check(arrays, step)
        if self._stream is not None:
            check_weights(arrays, whole=not self._spans_processes)

    def _place(self, array: np.ndarray) -> Array:
        """An array of a batch on the devices, from the rows at this process's positions."""
        size, positions = self._size, self._positions
        assert size is not None
        shape = (size, *array.shape[1:])
        if len(array) == size:
            return from_host(shape, self._sharding, array.__getitem__)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(size)
            return array[slice(*np.searchsorted(positions, (start, stop)))]

        return from_host(shape, self._sharding, part)

    def _rows_of(self, arrays: Arrays) -> int:
        """How many rows a batch has over all processes, from this process's part of it."""
        mine = len(next(iter(arrays.values())))
        if self._size is not None and len(self._positions) == mine:
            return self._size
        # The share of a batch's rows that this process holds.
        parts = self._sharding.num_devices
        share = len(positions_on_this_process(self._sharding, parts)) / parts
        rows = round(mine / share)
        inner = {name: array.shape[1:] for name, array in sorted(arrays.items())}
        if self._spans_processes:
            assert_same_on_all_processes("batch", {"rows": rows, "shapes": inner})
        check_batch_size(rows, self._mesh)
        return rows

    def _check_rows(self, rows: int, before: int | None) -> None:
        """Refuse batches of other sizes than those before the position."""
        if before not in (None, rows):
            raise UsageError(
                f"the batches have {rows} rows, and those before had {before}, so the "
                "saved position is of other examples; make batches of as many rows, or "
                "give the loader a grain.MapDataset of examples and batch_size=, which "
                "can change."
            )

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0 over all epochs.

        Iterators that exist already are not affected.

        **Arguments:**

        - `step`: the step. Beyond the last of `epochs`, there are no more batches.

        **Raises:**

        `ValueError` if it is negative, or is a step that was taken with another batch size.
        """
        step = _checked_step(step)
        if self._examples is not None:
            self._examples = self._examples.at(step)
        self._step = step

    @contextlib.contextmanager
    def from_start(self) -> Iterator[None]:
        """A context in which the loader is at its start; then it goes back to its place."""
        position = self._step, self._examples
        marks = None if self._stream is None else self._stream.marks()
        self.seek(0)
        try:
            yield
        finally:
            self._step, self._examples = position
            if self._stream is not None and marks is not None:
                self._stream.remember(marks)

    def stacked(self, count: int, *, capacity: int | None = None) -> DeviceBatches:
        """The next batches, for `train_step.many` or `eval_step.many` to gather.

        Needs `placement="device"`. Only row numbers are sent to the devices.

        **Arguments:**

        - `count`: how many batches.
        - `capacity`: the number of batches to leave room for, `count` by default. Steps
            compile once for each capacity, whatever the count; metrics have an entry for
            each batch that there is room for, with weight 0 if no step was taken.

        **Returns:**

        The batches, as [`eqxshard.training.TrainStep.many`][] takes them.

        **Raises:**

        `ValueError` if the dataset is on the host, fewer batches are left, or `count` is
        more than the capacity.
        """
        capacity = count if capacity is None else capacity
        if self._resident is None or self._examples is None:
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
        return self._resident.stacked(self._examples, steps, capacity=capacity)

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The indices in the source of the examples of a step's batch, without padding.

        Those of a `grain.MapDataset` go on counting in the next epoch.

        **Raises:**

        `ValueError` if the dataset has batches, whose examples have no indices; or if the
        step is negative, or was taken with another batch size.
        """
        if self._examples is None:
            raise UsageError(
                "the batches of this loader are made by its dataset, so their examples "
                "have no indices; look at the batch itself."
            )
        step = _checked_step(step)
        return self._examples.at(step).rows(step)

    def state(self, step: int | None = None) -> dict[str, Any]:
        """The position, as JSON values, for [`eqxshard.Loader.restore`][].

        If the dataset has batches and there are several processes, all of them must call
        this together.

        **Arguments:**

        - `step`: the step whose batch is the next one; by default, the batch after the one
            that was read last. What was read ahead does not count.

        **Returns:**

        That step; the number of examples before its batch, over all epochs, or the state of
        each process's iterator; and a fingerprint of what decides the examples.

        **Raises:**

        `ValueError` if the step is negative, or was taken with another batch size.
        """
        step = self._step if step is None else _checked_step(step)
        state: dict[str, Any] = {"step": step, "fingerprint": dict(self._fingerprint)}
        if self._examples is not None:
            steps = self._examples.at(step).steps
            return state | {"examples": steps.examples_before(step)}
        assert self._stream is not None
        own = self._stream.position(step)
        states = allgather_json(own) if self._spans_processes else [own]
        return state | {"rows": self._size or self._expected_size, "states": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position where [`eqxshard.Loader.state`][] was called.

        The mesh and the number of epochs may have changed since. With arrays and datasets
        of examples, the batch size and the number of processes may have changed, too: the
        loader goes on with the example that would have come next, in the same order, and
        each epoch still has each example once. Iterators that exist already are not
        affected.

        **Arguments:**

        - `state`: what `state` returned.

        **Raises:**

        `ValueError` if it belongs to a loader of other examples, or another number of
        processes made the batches; or if, with `remainder="error"`, the batch size does not
        divide the rest of the epoch. While iterating, `ValueError` if batches that the
        dataset makes have other numbers of rows than before.
        """
        step, theirs = state.get("step"), state.get("fingerprint")
        examples = state.get("examples", 0)
        if not (
            isinstance(step, int)
            and isinstance(examples, int)
            and isinstance(theirs, Mapping)
            and min(step, examples) >= 0
        ):
            raise UsageError(
                f"{state} is not the state of a loader; give what Loader.state() returned."
            )
        _check_same(self._fingerprint, theirs)
        if self._examples is not None:
            moved = self._examples.going_on(step, examples)
            _check_divides(self._fingerprint["remainder"], moved.steps, step)
            self._examples = moved
        else:
            assert self._stream is not None
            own = state["states"][jax.process_index() if self._spans_processes else 0]
            self._stream.restore(own)
            self._expected_size, self._size = state["rows"], None
            self._positions = np.arange(0)
        self._step = step


def positions_on_this_process(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """The positions in a batch whose devices belong to this process, in order."""
    indices = sharding.addressable_devices_indices_map((batch_size,)).values()
    rows = [range(batch_size)[index[0]] for index in indices if index is not None]
    if not rows:
        raise UsageError(
            "no device of the mesh belongs to this process, so it has no part of a batch; "
            "make the mesh of devices of all processes."
        )
    return np.unique(np.concatenate(rows))


def _checked_step(step: int) -> int:
    """A step as an integer of Python's, as JSON needs it; refuse negative ones."""
    if step < 0:
        raise UsageError(f"step {step} is before the start; give 0 or a later step.")
    return operator.index(step)


@atexit.register
def _close_iterators() -> None:
    for each in [*_ITERATORS]:
        # Another thread may be running it.
        with contextlib.suppress(ValueError):
            each.close()


def _check_same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise `ValueError` if two fingerprints differ."""
    before, now = _kind_of(theirs), _kind_of(ours)
    if before != now:
        raise UsageError(
            f"the state is of a loader of {before}, and this is one of {now}; make the "
            "loader as it was, or start a new run."
        )
    differ = [name for name in ours if theirs.get(name) != ours[name]]
    if not differ:
        return
    if differ == ["processes"]:
        raise UsageError(
            f"the batches were made by {theirs.get('processes')} processes, each from a "
            f"position of its own, and there are {ours['processes']} now; go on with as "
            "many, or give the loader a grain.MapDataset of examples and batch_size=, "
            "which any number of processes can share."
        )
    changes = (f"{name} was {theirs.get(name)!r} and is {ours[name]!r}" for name in differ)
    remedy = "make the loader as it was, or start a new run"
    if differ == ["first"]:
        remedy = (
            "make the dataset with the seed and the transforms that it had, and draw "
            "random numbers in .random_map(...) only, whose generators Grain seeds"
        )
    raise UsageError(
        f"the state is of a loader of other examples: {', '.join(changes)}; {remedy}."
    )


def _kind_of(fingerprint: Mapping[str, Any]) -> str:
    """The kind of source that a fingerprint belongs to."""
    if "seed" in fingerprint:
        return "arrays"
    if "first" in fingerprint:
        return "a grain.MapDataset of examples"
    is_grain = "workers" in fingerprint
    return "a Grain dataset of batches" if is_grain else "an iterable of batches"


def _check_divides(remainder: str, steps: Steps, step: int) -> None:
    if remainder == "error" and steps.remainder:
        raise UsageError(
            f"batches of {steps.size} leave {steps.remainder} examples of epoch "
            f"{steps.place(step)[0]} over, which goes on at step {step}; use a batch size "
            "that divides the rest of it, or go on from the end of an epoch."
        )
