"""Loaders of batches that somebody else makes: any iterator, of any length."""

import inspect
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from .._errors import UsageError, UsageTypeError
from ..distributed import assert_same_on_all_processes, spans_processes
from ..sharding._batch_weights import WEIGHT, check_weights
from ..sharding._leaves import GRAPHS, check_dtypes, check_integers
from ..sharding._mesh import batch_sharding, check_batch_size
from ._entries import FirstEntries
from ._pipeline import checked_step, place_rows, positions_on_this_process
from ._sources import copied

Batch = Mapping[str, Any]
_Arrays = dict[str, np.ndarray]

#: How long a closed iterator waits for its thread, which the other one may block.
_CLOSE_SECONDS = 2


class Stream:
    """A loader of the batches of an iterator; it has no epochs.

    [`eqxshard.data.from_iterator`][] makes these.
    """

    def __init__(
        self,
        make_iterator: Callable[..., Iterator[Batch]],
        *,
        mesh: Mesh,
        length: int | None,
        prefetch: int,
    ):
        self._make_iterator = make_iterator
        self._mesh = mesh
        self._length = length
        self._prefetch = prefetch
        self._takes_step = False
        # Some built-in functions have no signature.
        with suppress(ValueError):
            parameters = inspect.signature(make_iterator).parameters
            self._takes_step = "step" in parameters
        self._sharding = batch_sharding(mesh)
        # The share of a batch's rows that this process holds.
        parts = self._sharding.num_devices
        self._share = len(positions_on_this_process(self._sharding, parts)) / parts
        self._rows: int | None = None
        #: Those of the run that this continues.
        self._rows_before: int | None = None
        self._rebatched = False
        self._first = FirstEntries(
            "give all batches the same entries, shapes and dtypes; drop the last one of an "
            f"epoch (drop_last=True), or pad it with rows whose {WEIGHT!r} is 0"
        )
        self._step = 0

    def __iter__(self) -> Generator[dict[str, Array], None, None]:
        """The batches from the position on; close it to end its thread early."""
        first = self._step
        with closing(_ahead(self._batches(first), self._prefetch)) as batches:
            for step, arrays in enumerate(batches, start=first):
                self._step = step + 1
                yield self._place(arrays, step)
        if self._step == first > 0:
            warnings.warn(
                f"this loader gives no more batches: it is at step {first}, where its "
                "iterator ends; call loader.seek(0) to start again, or give length=, the "
                "number of its batches, to go on with another pass.",
                stacklevel=2,
            )

    def seek(self, step: int) -> None:
        """Go to the batch of a step, counted from 0 over all epochs."""
        self._step = checked_step(step)

    def state(self) -> dict[str, Any]:
        """The position, and the rows of a batch once one was read, for `restore`."""
        return {"step": self._step, "rows": self._rows}

    def restore(self, state: Mapping[str, Any], *, rebatch: bool = False) -> None:
        """Go to the position where `state` was called.

        **Arguments:**

        - `state`: what `state` returned.
        - `rebatch`: whether batches may have another number of rows than then. Which
            examples they have is up to the function that makes the iterator.

        **Raises:**

        `ValueError` if that function has no parameter `step`, and `rebatch` is asked for.
        While iterating, `ValueError` if batches have other rows, and it is not.
        """
        if rebatch and not self._takes_step:
            raise UsageError(
                "this iterator starts with the batches of all earlier steps, which with "
                "another batch size are of other examples than those seen; give the "
                "function that makes it a parameter step, to go on from there."
            )
        # `fit` restores it once more.
        self._rebatched = self._rebatched or rebatch
        self._rows_before = state.get("rows")
        self.seek(state["step"])

    def _batches(self, first: int) -> Generator[_Arrays, None, None]:
        """The batches of all passes over the data, from a step on."""
        step = first if self._takes_step else 0
        while True:
            start = step
            options = {"step": step} if self._takes_step else {}
            iterator = iter(self._make_iterator(**options))
            try:
                for batch in iterator:
                    step += 1
                    if step > first:
                        yield _copied(batch, step - 1)
            finally:
                # Generators have one; other iterators may.
                getattr(iterator, "close", lambda: None)()
            if self._length is None:
                return
            if step == start or step % self._length:
                raise UsageError(
                    f"the iterator ended before step {step}, {step % self._length} batches "
                    f"into an epoch of length={self._length}; give the number of batches "
                    "that it has."
                )

    def _place(self, arrays: _Arrays, step: int) -> dict[str, Array]:
        named = ((repr(name), array) for name, array in arrays.items())
        check_dtypes(named, "convert it to numbers, or leave it out")
        check_integers(arrays)
        self._first.check(arrays, step)
        rows = self._count_rows({n: a.shape for n, a in arrays.items()}, step)
        positions = positions_on_this_process(self._sharding, rows)
        check_weights(arrays, whole=len(positions) == rows)
        return {
            name: place_rows(array, self._sharding, positions, rows)
            for name, array in arrays.items()
        }

    def _count_rows(self, shapes: dict[str, tuple[int, ...]], step: int) -> int:
        """The rows of a batch on all processes, of arrays of these shapes."""
        ours = {shape[:1] for shape in shapes.values()}
        if len(ours) > 1 or () in ours:
            raise UsageError(
                f"the batch of step {step} has the shapes {shapes}; give all arrays of a "
                f"batch the same number of rows ({GRAPHS})."
            )
        ((mine,),) = ours
        rows = round(mine / self._share)
        if self._rows is None:
            if spans_processes(self._mesh.devices.flat):
                inner = {name: shape[1:] for name, shape in sorted(shapes.items())}
                assert_same_on_all_processes("batch", {"rows": rows, "shapes": inner})
            check_batch_size(rows, self._mesh)
            if self._rows_before not in (None, rows) and not self._rebatched:
                raise UsageError(
                    f"the batch of step {step} has {rows} rows, and those before had "
                    f"{self._rows_before}; make batches of as many, or call "
                    "loader.restore(state, rebatch=True) if the iterator goes on from the "
                    "example that would have come next."
                )
            self._rows = rows
        return rows


class SizedStream(Stream):
    """A stream that counts its batches in epochs."""

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        assert self._length is not None
        return self._length


def from_iterator(
    make_iterator: Callable[..., Iterator[Batch]],
    *,
    mesh: Mesh,
    length: int | None = None,
    prefetch: int = 2,
) -> Stream:
    """A loader of batches that you make: by tf.data, PyTorch, a simulator, a generator.

    The batches are placed on the mesh, their rows split over the axes `data` and `fsdp`,
    and prefetched in a thread. [`eqxshard.fit`][] takes the loader like any other.

    A resumed run continues with the batch of its step. If `make_iterator` has a parameter
    `step`, it is asked for an iterator from there; that this gives the batches that an
    uninterrupted run would get is up to you. Otherwise the iterator is made as at the
    start, and the batches of earlier steps are made again and thrown away, which takes
    their time and needs an iterator that repeats itself.

    With several processes, each gives the rows of its own devices, and the same number of
    them: of a batch of 256 on two processes, 128.

    **Arguments:**

    - `make_iterator`: returns an iterator of dicts of NumPy arrays, or of what
        `np.asarray` converts, such as tensors. They are copied, so the iterator may use its
        arrays again. The function may have a parameter `step`, the step of the first
        batch, counted from 0. It is called again for each pass over the data.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `length`: the number of batches in an epoch. An iterator that ends there is made
        anew for the next epoch. By default there are no epochs, and the loader ends with
        its iterator.
    - `prefetch`: how many batches to make ahead. With 0 there is no thread, and each
        batch is made when it is asked for.

    **Returns:**

    A loader, with `seek(step)`, `state()`, `restore(state)` and, if `length` is given,
    `len`. It is resumed with batches of another size only by `restore(state,
    rebatch=True)`, and if `make_iterator` has a parameter `step`.

    **Raises:**

    `TypeError` if `make_iterator` cannot be called; `ValueError` if a number is out of
    range. While iterating, `TypeError` if a batch is not a dict of arrays that devices can
    hold; `ValueError` if its rows do not divide over the mesh, its shapes are not those
    of the first batch, or the iterator ends within an epoch.

    !!! Example

        ```python
        def batches(step):
            for number in itertools.count(step):
                rng = np.random.default_rng(number)
                x = rng.normal(size=(256, 8)).astype(np.float32)
                yield {"x": x, "y": x.sum(axis=1)}


        loader = eqxshard.data.from_iterator(batches, mesh=mesh)
        state = eqxshard.fit(state, train_step, loader, steps=1000)
        ```
    """
    if not callable(make_iterator):
        raise UsageTypeError(
            f"a {type(make_iterator).__name__} cannot be started again; give a function "
            "that returns the iterator, such as lambda: iter(batches)."
        )
    for name, value, least in (("length", length, 1), ("prefetch", prefetch, 0)):
        if value is not None and value < least:
            raise UsageError(f"{name}={value} must be at least {least}.")
    if spans_processes(mesh.devices.flat):
        assert_same_on_all_processes("loader", {"length": length})
    kind = Stream if length is None else SizedStream
    return kind(make_iterator, mesh=mesh, length=length, prefetch=prefetch)


def _copied(batch: Any, step: int) -> _Arrays:
    """The arrays of a batch; CPU devices would share those that the iterator may refill."""
    if not isinstance(batch, Mapping) or not batch:
        raise UsageTypeError(
            f"the iterator gave a {type(batch).__name__} for step {step}; give dicts "
            "of arrays by name, such as {'x': x, 'y': y}."
        )
    # np.array would ask tensors for the copy, which some refuse with a warning.
    return {name: copied(np.asarray(array)) for name, array in batch.items()}


def _ahead(
    batches: Generator[_Arrays, None, None], count: int
) -> Generator[_Arrays, None, None]:
    """The batches of a generator, of which a thread of its own makes some ahead."""
    if count == 0:
        with closing(batches):
            yield from batches
        return
    # Not a Grain pipeline, whose elements are functions of their index.
    made: queue.SimpleQueue[_Arrays | BaseException | None] = queue.SimpleQueue()
    free = threading.Semaphore(count - 1)
    closed = threading.Event()

    def work() -> None:
        try:
            with closing(batches):
                for batch in batches:
                    made.put(batch)
                    free.acquire()
                    if closed.is_set():
                        return
        except BaseException as error:
            made.put(error)
        else:
            made.put(None)

    # A process does not wait for a daemon, which a source may block.
    thread = threading.Thread(target=work, name="eqxshard-batches", daemon=True)
    thread.start()
    try:
        while (batch := made.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            free.release()
            yield batch
    finally:
        closed.set()
        free.release()
        # The garbage collector may run this in that very thread.
        if threading.current_thread() is not thread:
            thread.join(_CLOSE_SECONDS)
