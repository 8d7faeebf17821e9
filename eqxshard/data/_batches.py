"""Batches on the host, made of examples that have an index.

These are the rows of arrays, or the elements of a `grain.MapDataset`, whose indices go on
in the next epoch. Next door, `_stream.py` takes batches that others make. Grain reads both
ahead. Neither knows devices: `_loader.py` places the batches. *Row*, *place* and *step* are
explained in `_order.py`; a *position* is a row's position in its batch.
"""

import functools
import hashlib
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Int

from .._errors import UsageError, UsageTypeError
from ..sharding._batch_weights import WEIGHT, check_weights
from ..sharding._leaves import GRAPHS, check_dtypes, check_not_masked
from ..sharding._text import first_few
from ._order import Order, Steps
from ._sources import ArraySource, Source, as_source, copied, empty, is_map_dataset

#: The rows of a batch that this process holds, by name.
Arrays = dict[str, np.ndarray]
#: Called with this process's rows of each batch.
Transform = Callable[[Arrays], Mapping[str, Any]]

#: How many threads read a Grain dataset by default, one batch each.
THREADS = 16

#: Handing something to another thread costs as much as gathering a batch of small images,
#: so small batches of arrays are gathered and handed over together, up to this many bytes
#: and this many batches.
_TOGETHER_BYTES = 2**21
_TOGETHER_BATCHES = 16

#: From this length on, datasets are endless: `.repeat()` was called without a number.
_ENDLESS = 2**40


@dataclass(frozen=True)
class Reading:
    """How batches are read ahead.

    - `prefetch`, `options`, `workers`: as for the loader; `options` is `read_options`.
    """

    prefetch: int
    options: Any
    workers: int

    @property
    def is_on_demand(self) -> bool:
        """True if no batch is read ahead."""
        return self.prefetch == 0 and self.options is None and not self.workers

    def read(self, batches: Any, threads: int) -> Any:
        """An iterator of a `grain.MapDataset` of batches, which reads ahead.

        **Arguments:**

        - `batches`: the dataset.
        - `threads`: how many threads read it, where neither `prefetch=0` nor `options`
            says otherwise.
        """
        import grain

        options = self.options
        if options is None and self.prefetch == 0:
            options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        if options is None:
            ahead = max(self.prefetch, threads)
            options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        return iter(self.in_workers(batches.to_iter_dataset(options)))

    def in_workers(self, batches: Any) -> Any:
        """A `grain.IterDataset` that is read in worker processes, if any are asked for."""
        if not self.workers:
            return batches
        import grain
        from absl import flags

        # Grain reads flags of absl, which are parsed only in programs that absl starts.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        each = max(-(-self.prefetch // self.workers), 1)
        return batches.mp_prefetch(grain.MultiprocessingOptions(self.workers, each))


@dataclass(frozen=True)
class ExampleBatches:
    """Makes this process's part of the batch of any step, of examples that have an index.

    - `read`: reads the examples at some indices.
    - `indices`: returns the indices of the examples in an epoch from one place up to, but
        not including, another.
    - `steps`: the places of each step's batch.
    - `transform`: as for the loader.
    - `positions`: the positions in a batch that this process holds.
    - `threads`: how many threads read at a time, one batch each.
    """

    read: Callable[[Int[np.ndarray, " n"]], Arrays]
    indices: Callable[[int, int, int], Int[np.ndarray, " n"]]
    steps: Steps
    transform: Transform | None
    positions: Int[np.ndarray, " positions"]
    threads: int = 1
    #: One transform at a time: it may reuse its memory, and several threads make batches.
    _turn: Any = field(default_factory=threading.Lock, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=threading.Lock())

    @property
    def pads(self) -> bool:
        """True if some batches have rows of padding."""
        return self.steps.fills and self.steps.remainder > 0

    def at(self, step: int) -> "ExampleBatches":
        """The same batches, to be read from a step on.

        **Raises:**

        `ValueError` if the step was taken with another batch size.
        """
        first = self.steps.first
        if step == 0 < first:
            return replace(self, steps=self.steps.going_on(0, 0))
        if step < first:
            raise UsageError(
                f"step {step} is before step {first}, from which on this loader has "
                f"batches of {self.steps.size}; make another loader with the batch size "
                "of that step."
            )
        return self

    def going_on(self, step: int, examples: int) -> "ExampleBatches":
        """The same, continued at a step before which a number of examples were read."""
        return replace(self, steps=self.steps.going_on(step, examples))

    def rows(self, step: int) -> Int[np.ndarray, " n"]:
        """The indices of the examples of a step's batch, on all processes."""
        epoch, start = self.steps.place(step)
        return self.indices(epoch, start, start + self.steps.size)

    def padded(
        self, steps: range, positions: Int[np.ndarray, " positions"]
    ) -> tuple[Int[np.ndarray, "steps positions"], Bool[np.ndarray, "steps positions"]]:
        """The rows at some positions of some steps' batches, and which are real.

        **Arguments:**

        - `steps`: the steps.
        - `positions`: the positions, in ascending order.
        """
        real = np.zeros((len(steps), len(positions)), bool)
        padded = np.zeros((len(steps), len(positions)), np.int64)
        for i, step in enumerate(steps):
            rows = self.rows(step)
            held = positions[: np.searchsorted(positions, len(rows))]
            real[i, : len(held)] = True
            padded[i, : len(held)] = rows[held]
        return padded, real

    def batches(self, steps: range, reading: Reading) -> Generator[Arrays]:
        """The batches of some steps, read ahead; close it to end its threads early."""
        if reading.is_on_demand:
            yield from map(self.make, steps)
            return
        first, together = [], 1
        if self.threads == 1 and self.transform is None:
            first, steps = [self.make(step) for step in steps[:1]], steps[1:]
            nbytes = sum(array.nbytes for batch in first for array in batch.values())
            together = min(max(_TOGETHER_BYTES // max(nbytes, 1), 1), _TOGETHER_BATCHES)
        if together > 1:
            # With one group ahead, the thread would wait for us as often as we for the
            # thread.
            ahead = max(-(-reading.prefetch // together), 2)
            reading = replace(reading, prefetch=ahead)
        if "grain" not in sys.modules:
            # Grain takes as long to import as JAX; the first step need not wait for that.
            yield from first
            first = []
        import grain

        firsts = grain.MapDataset.range(steps.start, steps.stop, together)
        groups = firsts.map(functools.partial(self._make_group, steps.stop, together))
        with closing(reading.read(groups, self.threads)) as groups:
            groups.start_prefetch()
            yield from first
            for group in groups:
                yield from group

    def make(self, step: int) -> Arrays:
        """The batch of a step."""
        (batch,) = self._make_group(step + 1, 1, step)
        return batch

    def _make_group(self, stop: int, count: int, first: int) -> list[Arrays]:
        """The batches of `count` steps from `first` on, but none from `stop` on."""
        steps = range(first, min(first + count, stop))
        size = len(self.positions)
        try:
            rows, real = self.padded(steps, self.positions)
            arrays = self.read(rows.reshape(-1))
            parts = (
                {name: array[i * size : (i + 1) * size] for name, array in arrays.items()}
                for i in range(len(steps))
            )
            return [self._finish(part, ours) for part, ours in zip(parts, real)]
        except StopIteration as error:
            raise stopped(f"the batch of step {first}", error) from error

    def shapes(self, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of a batch of all processes; reads one example."""
        # As a row of padding, so that it has a weight if any batch has one.
        arrays = self._finish(self.read(np.zeros(1, int)), np.zeros(1, bool))
        return whole_shapes(arrays, self.steps.size, sharding)

    def everything(self, count: int) -> Arrays:
        """All the examples of the source, in its order."""
        return self._finish(self.read(np.arange(count)), np.ones(count, bool))

    def _finish(self, arrays: Arrays, real: Bool[np.ndarray, " rows"]) -> Arrays:
        size = len(real)
        with self._turn:
            arrays = finished(arrays, self.transform)
        # Full batches without weights of their own share an array of ones on the devices.
        if self.pads and not (real.all() and WEIGHT not in arrays):
            weight = arrays.get(WEIGHT, np.ones(size, np.float32))
            if weight.shape != (size,):
                raise UsageError(
                    f"{WEIGHT!r} has shape {weight.shape} for {size} examples; give one "
                    "number per example, or use another name."
                )
            arrays = arrays | {WEIGHT: np.where(real, weight, 0).astype(np.float32)}
        check_weights(arrays, whole=size == self.steps.size)
        return arrays


def make_examples(
    source: Any,
    size: int,
    *,
    transform: Transform | None,
    remainder: str,
    **order: Any,
) -> tuple[ExampleBatches, dict[str, Any]]:
    """Batches of arrays or of a `grain.MapDataset` of examples.

    **Arguments:**

    - `source`, `transform`: as for the loader.
    - `remainder`: as for the loader; `check_remainder` says whether it suits the source.
    - `size`: the batch size.
    - `order`: the `seed`, `shuffle` and `sampler` of arrays.

    **Returns:**

    The batches, all of whose positions this process holds, and a fingerprint of what
    decides which examples they have. Its `"length"` is `None` if the dataset is endless.
    """
    if is_map_dataset(source):
        check_has_all(
            source,
            "an example",
            "call .to_iter_dataset().batch(n) on it, and leave batch_size= out",
        )
        places, length = len(source), finite_length(source)
        fingerprint: dict[str, Any] = {"length": length}
        read = functools.partial(read_examples, source)
        indices, threads = functools.partial(_indices_in, places), THREADS
    else:
        source = as_source(source)
        rows = Order(len(source), **order)
        places = length = len(rows)
        fingerprint = {
            "length": len(source),
            "seed": rows.seed,
            "shuffle": rows.shuffle,
            "sampler": rows.digest(),
        }
        read, indices = functools.partial(read_rows, source), rows.rows
        threads = 1
    steps = Steps(size, places, fills=remainder == "pad" and length is not None)
    whole = np.arange(size)
    made = ExampleBatches(read, indices, steps, transform, whole, threads)
    return made, fingerprint | {"remainder": remainder}


def read_rows(source: Source, rows: Int[np.ndarray, " n"]) -> Arrays:
    """Some rows of a source, in memory that nothing else refers to."""
    arrays = checked("the source's gather", source.gather(rows), len(rows))
    if type(source) is ArraySource:
        return arrays
    return {name: copied(array) for name, array in arrays.items()}


def read_examples(dataset: Any, indices: Int[np.ndarray, " n"]) -> Arrays:
    """The examples of a `grain.MapDataset` at some indices, stacked."""
    listed = indices.tolist()
    # Padding has the same index many times.
    found = {index: dataset[index] for index in dict.fromkeys(listed)}
    examples = [found[index] for index in listed]
    names: list[str] = []
    for index, example in zip(listed, examples):
        if not isinstance(example, Mapping) or not example:
            raise UsageTypeError(
                f"example {index} of the dataset is {kind_of(example)}; make each a dict "
                "of arrays and numbers, with .map(lambda x: {'x': x}), say; after "
                ".filter(...), call .to_iter_dataset().batch(n), and leave batch_size= out."
            )
        names = names or [*example]
        if names != [*example] and {*names} != {*example}:
            raise UsageError(
                f"example {index} of the dataset has the entries {sorted(example)}, and "
                f"example {listed[0]} has {sorted(names)}; give all examples the same."
            )
    return {name: _stacked(name, [x[name] for x in examples], listed) for name in names}


def check_has_all(dataset: Any, element: str, remedy: str) -> None:
    """Refuse a `grain.MapDataset` without an element at some of its indices.

    **Arguments:**

    - `dataset`: the dataset.
    - `element`: what the error calls an element, such as `an example`.
    - `remedy`: what to do about it.
    """
    try:
        dataset.batch(1)
    except ValueError as error:
        said = f"{error}".strip().partition("\n")[0]
        raise UsageError(
            f"not every index of this dataset has {element}, as after .filter(...), so "
            f"the loader cannot count them; {remedy}. (Grain says: {said})"
        ) from error


def _indices_in(length: int, epoch: int, start: int, stop: int) -> Int[np.ndarray, " n"]:
    """The indices of a `grain.MapDataset`'s examples at some places of an epoch."""
    return epoch * length + np.arange(start, min(stop, length))


def _stacked(name: str, entries: list[Any], indices: list[int]) -> np.ndarray:
    for entry in entries:
        check_not_masked(repr(name), entry)
    arrays = [np.asarray(entry) for entry in entries]
    first = arrays[0]
    if first.dtype.hasobject:
        raise UsageTypeError(
            f"{name!r} is {kind_of(entries[0])} in example {indices[0]}; make each entry "
            "an array or a number, with .map(...)."
        )
    for index, array in zip(indices, arrays):
        if array.shape != first.shape:
            raise UsageError(
                f"{name!r} has the shape {first.shape} in example {indices[0]} and "
                f"{array.shape} in example {index}; pad or crop them to one shape with "
                ".map(...), or pack them. If these are batches, leave batch_size= out."
            )
    memory = empty((len(arrays), *first.shape), np.result_type(*arrays))
    return np.stack(arrays, out=memory)


def finished(arrays: Arrays, transform: Transform | None) -> Arrays:
    """The rows of a batch after its transform, checked."""
    if transform is not None:
        size, ours = len(next(iter(arrays.values()))), dict(arrays)
        made = checked("the transform", transform(arrays), size)
        # The transform may have put the others into memory that it uses again.
        arrays = {
            name: array if array is ours.get(name) else copied(array)
            for name, array in made.items()
        }
    _check_not_ragged(arrays)
    named = ((repr(name), array) for name, array in arrays.items())
    check_dtypes(named, "use a transform that converts it to numbers, or drops it")
    return arrays


def whole_shapes(
    arrays: Arrays, rows: int, sharding: Sharding | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a batch with `rows` rows on all processes."""
    return {
        name: jax.ShapeDtypeStruct(
            (rows, *array.shape[1:]),
            jax.dtypes.canonicalize_dtype(array.dtype),
            sharding=sharding,
        )
        for name, array in arrays.items()
    }


def finite_length(source: Any) -> int | None:
    """The number of elements in a pass; `None` if it is endless, or not known."""
    try:
        length = len(source)
    except TypeError:
        return None
    return None if length >= _ENDLESS else length


def stopped(what: str, error: StopIteration) -> RuntimeError:
    """The error to raise for a `StopIteration`, which would look like the end of data."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return RuntimeError(
        f"line {at.lineno} of {at.filename} raised StopIteration while {what} was made; "
        "give next() a default there, or raise another error."
    )


def checked(who: str, arrays: Any, count: int) -> Arrays:
    """The entries that `who` returned for `count` examples, as arrays; refuse others."""
    if not isinstance(arrays, Mapping):
        raise UsageTypeError(f"{who} returned {kind_of(arrays)}; return a dict of arrays.")
    if not arrays:
        raise UsageError(f"{who} returned a dict without entries; return one of arrays.")
    found = {name: as_array(name, entry) for name, entry in arrays.items()}
    for name, array in found.items():
        if array.shape[:1] != (count,):
            raise UsageError(
                f"{who} returned {name!r} of shape {array.shape} for {count} rows; "
                f"return that many rows in each entry ({GRAPHS})."
            )
    return found


def as_array(name: str, entry: Any) -> np.ndarray:
    """An entry of a batch as an array; refuse masks, and rows of several shapes."""
    check_not_masked(repr(name), entry)
    try:
        return np.asarray(entry)
    except ValueError:
        if not isinstance(entry, list | tuple):
            raise
        raise _ragged(name, {np.shape(row) for row in entry}) from None


def _check_not_ragged(arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        is_array = array.dtype == object and [isinstance(x, np.ndarray) for x in array.flat]
        if is_array and all(is_array):
            raise _ragged(name, {row.shape for row in array.flat})


def _ragged(name: str, shapes: set[tuple[int, ...]]) -> UsageError:
    return UsageError(
        f"{name!r} has rows of the shapes {first_few([*map(str, sorted(shapes))])}; pad or "
        "crop them to one shape in the dataset or with a transform."
    )


def kind_of(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def parts_of(dataset: Any) -> list[Any]:
    """A dataset of Grain's, and all the datasets that it is made of."""
    return [dataset, *(part for each in dataset.parents for part in parts_of(each))]


def describe_part(part: Any) -> str:
    """The kind of a part, and how many elements it has."""
    length = f" of {len(part)}" if is_map_dataset(part) else ""
    return f"{type(part).__name__}{length}"


def digest_of_first(dataset: Any) -> str:
    """A digest of the first example of a `grain.MapDataset`, to tell datasets apart."""
    found = hashlib.sha256()
    for name, array in sorted(read_examples(dataset, np.arange(1)).items()):
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def check_remainder(remainder: str, examples: ExampleBatches, endless: bool) -> None:
    """Refuse epochs without batches, and with "error", examples that fill no batch."""
    if remainder not in ("pad", "drop", "error"):
        raise UsageError(f"remainder={remainder!r} is not 'pad', 'drop' or 'error'.")
    if endless:
        return
    length, batch_size = examples.steps.length, examples.steps.size
    if length == 0:
        raise UsageError("an epoch has no examples; give a source and sampler with some.")
    left = length % batch_size
    if remainder == "error" and left:
        raise UsageError(
            f"batches of {batch_size} leave {left} of {length} examples over; use a batch "
            "size that divides, or remainder='pad' or 'drop'."
        )
    if remainder == "drop" and left == length:
        raise UsageError(
            f"an epoch has {length} examples, fewer than one batch of {batch_size}, and "
            "remainder='drop' drops them all; use a smaller batch size or remainder='pad'."
        )
