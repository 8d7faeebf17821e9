"""Batches that others make: a Grain dataset of batches, or any iterable of them.

Next door, `_batches.py` makes batches of examples, and says how batches are read ahead.
"""

import collections
import copy
import json
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import UsageError, UsageTypeError
from ..distributed import allgather_json, is_main_process
from ..sharding._leaves import GRAPHS
from ..sharding._text import say
from ._batches import (
    THREADS,
    Arrays,
    Reading,
    Transform,
    as_array,
    check_has_all,
    describe_part,
    finished,
    finite_length,
    kind_of,
    parts_of,
    stopped,
)
from ._sources import copied, is_iter_dataset, is_map_dataset

#: A stream knows its iterator's state at this many of the last steps.
_MARKS = 16

#: Processes read this many batches before they compare how many each of them has.
_GROUP = 8

#: How long a closed iterator waits for its thread, which the user's code may block.
_CLOSE_SECONDS = 2

#: Marks bytes in the state of an iterator.
_BYTES = "__bytes__"


class BatchStream:
    """Batches that others make: a Grain dataset of batches, or any iterable of them.

    **Arguments:**

    - `batches`: a `grain.MapDataset`, a `grain.IterDataset` or an iterable.
    - `reading`: how they are read ahead.
    - `transform`: as for the loader.
    - `spans`: whether each of several processes has a part of each batch.
    """

    def __init__(
        self, batches: Any, reading: Reading, transform: Transform | None, spans: bool
    ):
        self._batches = batches
        self._reading = reading
        self._transform = transform
        self._spans = spans
        #: The number of batches in a pass, if they have one.
        self.length = finite_length(batches)
        #: True if the dataset says that there is no last batch.
        self.is_endless = is_map_dataset(batches) and self.length is None
        if is_map_dataset(batches):
            remedy = "call .to_iter_dataset() on it"
            check_has_all(batches, "a batch", remedy)
        #: The datasets that a dataset of Grain's is made of. Grain tells neither their
        #: seeds nor their functions.
        self._parts: list[str] | None = None
        self._is_grain = is_map_dataset(batches) or is_iter_dataset(batches)
        if self._is_grain:
            self._parts = [describe_part(part) for part in parts_of(batches)]
        #: How many whole passes of an iterable with a length were read.
        self._passes = 0
        #: The last steps that were read.
        self._marks: collections.deque[Mark] = collections.deque(maxlen=_MARKS)

    def marks(self) -> "list[Mark]":
        """The steps at which the iterator's state is known, for `remember`."""
        return [*self._marks]

    def remember(self, marks: "Sequence[Mark]") -> None:
        """Replace the steps at which the iterator's state is known."""
        self._marks.clear()
        self._marks.extend(marks)

    def nearest(self, step: int) -> "Mark":
        """The last step, up to this one, at which the iterator's state is known."""
        if is_map_dataset(self._batches):
            return Mark(step, None)
        known = [mark for mark in self._marks if mark.step <= step]
        return max(known, key=lambda mark: mark.step, default=Mark(0, None))

    def position(self, step: int) -> list[Any]:
        """This process's position before the batch of a step, as JSON values."""
        mark = self.nearest(step)
        return [mark.step, _as_json(mark.state), self._parts]

    def restore(self, position: Sequence[Any]) -> None:
        """Replace the known positions by one that `position` returned.

        **Raises:**

        `ValueError` if it is from a dataset that is made of other parts.
        """
        step, state, parts = position
        if parts != self._parts:
            raise UsageError(
                f"the saved position is of a dataset made of {parts}, and this one is made "
                f"of {self._parts}; make it as it was. (For another batch size, give the "
                "loader a grain.MapDataset of examples, and batch_size=.)"
            )
        self.remember([Mark(step, _from_json(state))])

    def first(self) -> Arrays:
        """This process's part of the first batch, which is read for its shapes.

        If one of several processes has none, all of them raise an error.
        """
        arrays: Arrays = {}
        failure: Exception | None = None
        try:
            with closing(_HostIterator(self._open(), self._transform)) as iterator:
                arrays = next(iterator)
        except StopIteration:
            failure = _no_batches()
        except Exception as error:
            failure = error
        failures = [failure and repr(failure)]
        if self._spans:
            failures = allgather_json(failures[0])
        raise_in_all(failure, failures)
        return arrays

    def batches(
        self, start: "Mark", step: int, check: Callable[[Arrays, int], None]
    ) -> Generator[Arrays]:
        """The batches from a step on, read ahead; close it to end its threads early.

        **Arguments:**

        - `start`: the nearest step whose state is known, `nearest(step)`.
        - `step`: the step to begin with. Batches before it are read again.
        - `check`: called with a batch and its step, raises an error if it is refused. If
            it does so in one of several processes, all of them raise one.
        """
        iterator = _HostIterator(self._open(start.step), self._transform)
        ahead: Any = iterator
        try:
            if start.state is not None:
                iterator.set_state(start.state)
            if step > start.step:
                _say_again(step - start.step)
                for _ in range(start.step, step):
                    iterator.skip()
            if self._ahead:
                import grain

                prefetch = grain.experimental.ThreadPrefetchDatasetIterator
                ahead = prefetch(iterator, self._ahead)
            read = _read_in_groups if self._spans else _read
            count = step
            for arrays, state in read(ahead, step, check):
                count += 1
                self._marks.append(Mark(count, state))
                if self.length:
                    self._passes = max(self._passes, count // self.length)
                yield arrays
            if count == 0:
                raise _no_batches()
        finally:
            _close(ahead, iterator)

    @property
    def _ahead(self) -> int:
        """How many batches a thread reads ahead; with 0, there is no thread."""
        if not self._reading.prefetch:
            return 0
        if self._spans:
            # All batches of a group are read before the first is given.
            return max(self._reading.prefetch, _GROUP)
        # Grain reads ahead itself, and one more thread would take time from its own.
        alone = self._is_grain and self._transform is None
        return 0 if alone else self._reading.prefetch

    def _open(self, step: int = 0) -> Any:
        """An iterator with `get_state` and `set_state`; only a `MapDataset`'s at `step`."""
        if self.length == 0:
            raise _no_batches()
        if is_map_dataset(self._batches):
            import grain

            # Beyond its length, the dataset goes on with its next epoch.
            steps = grain.MapDataset.range(step, sys.maxsize)
            return self._reading.read(steps.map(self._batches.__getitem__), THREADS)
        if is_iter_dataset(self._batches):
            return iter(self._reading.in_workers(self._batches))
        return _Passes(self._batches, self.length, self._passes)


@dataclass(frozen=True)
class Mark:
    """A step of a stream, and the state of its iterator before that step's batch.

    - `step`: the step.
    - `state`: what the iterator's `get_state()` returned; `None` for the first batch.
    """

    step: int
    state: Any


def _no_batches() -> UsageError:
    return UsageError(
        "the dataset has no batches; look at its filters, and at the number of its "
        "examples, where drop_remainder=True drops those that fill no batch."
    )


def _read(
    iterator: Any, step: int, check: Callable[[Arrays, int], None]
) -> Generator[tuple[Arrays, Any]]:
    """The batches of an iterator, the first of which is that of a step, with its state."""
    for at, arrays in enumerate(iterator, start=step):
        check(arrays, at)
        yield arrays, iterator.get_state()


def _read_in_groups(
    iterator: Any, step: int, check: Callable[[Arrays, int], None]
) -> Generator[tuple[Arrays, Any]]:
    """The same, until a process has no more: a step without one process would hang."""
    while True:
        group: list[tuple[Arrays, Any]] = []
        failure: Exception | None = None
        try:
            while len(group) < _GROUP:
                arrays = next(iterator)
                check(arrays, step + len(group))
                group.append((arrays, iterator.get_state()))
        except StopIteration:
            pass
        except Exception as error:
            failure = error
        everyone = allgather_json([len(group), failure and repr(failure)])
        counts = [count for count, _ in everyone]
        yield from group[: min(counts)]
        raise_in_all(failure, [theirs for _, theirs in everyone])
        step += min(counts)
        if max(counts) > min(counts):
            fewest, most = counts.index(min(counts)), counts.index(max(counts))
            raise UsageError(
                f"process {fewest} has only {step} batches, and process {most} has more; "
                "give all processes the same number, with .repeat(), say, or drop the last "
                "ones of the others."
            )
        if counts[0] < _GROUP:
            return


def raise_in_all(failure: Exception | None, failures: Sequence[str | None]) -> None:
    """Raise an error in all processes if one of them has failed.

    **Arguments:**

    - `failure`: the error of this process, if it has failed.
    - `failures`: the text of the error of each process, `None` if it has not failed.
    """
    if failure is not None:
        raise failure
    for process, text in enumerate(failures):
        if text is not None:
            raise UsageError(
                f"process {process} could not make its batches: {text}; look at its own "
                "output."
            )


def _close(ahead: Any, iterator: "_HostIterator") -> None:
    """End the thread that reads ahead, if there is one, and the iterator."""
    if ahead is not iterator:
        # `close` waits for the thread, which may wait for a batch that never comes.
        closing = threading.Thread(target=ahead.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            return
    iterator.close()


class _HostIterator:
    """The batches of an iterator, checked and copied, with its state."""

    def __init__(self, batches: Any, transform: Transform | None):
        self._batches = batches
        self._transform = transform

    def __iter__(self) -> "_HostIterator":
        return self

    def __next__(self) -> Arrays:
        batch = next(self._batches)
        try:
            return self._finish(batch)
        except StopIteration as error:
            raise stopped("a batch", error) from error

    def skip(self) -> None:
        """Read a batch, and throw it away."""
        next(self._batches, None)

    def get_state(self) -> Any:
        return copy.deepcopy(self._batches.get_state())

    def set_state(self, state: Any) -> None:
        try:
            # The iterator may keep this dict as its own state.
            self._batches.set_state(copy.deepcopy(state))
        except UsageError:
            raise
        # Grain's iterators raise a KeyError, say, where the state is not as they expect.
        except Exception as error:
            raise UsageError(
                f"the saved position does not fit the dataset ({error!r}); make the "
                "dataset as it was."
            ) from error

    def close(self) -> None:
        # Generators and Grain's iterators have this method; others may.
        getattr(self._batches, "close", lambda: None)()

    def _finish(self, batch: Any) -> Arrays:
        if not isinstance(batch, Mapping) or not batch:
            raise UsageTypeError(
                f"the dataset gave {kind_of(batch)} for a batch; give dicts of arrays by "
                "name, such as {'x': x, 'y': y}."
            )
        # CPU devices would share memory that the iterator may fill again. (np.array would
        # ask tensors for the copy, which some refuse with a warning.)
        arrays = {name: copied(as_array(name, x)) for name, x in batch.items()}
        rows = {array.shape[:1] for array in arrays.values()}
        if len(rows) > 1 or () in rows:
            shapes = {name: array.shape for name, array in arrays.items()}
            raise UsageError(
                f"a batch has the shapes {shapes}; give all arrays of a batch the same "
                "number of rows, or, if these are examples, give the loader batch_size= "
                f"or call .batch(n) ({GRAPHS})."
            )
        return finished(arrays, self._transform)


class _Passes:
    """Reads an iterable of batches: again and again if it has a length, else once.

    Its state is the number of batches read and, if the iterable's own iterator has one,
    the state of that.

    **Arguments:**

    - `batches`: the iterable.
    - `length`: the number of batches in a pass; `None` if that is not known.
    - `done`: how many whole passes of this iterable were read, which need not be repeated.
    """

    def __init__(self, batches: Iterable[Any], length: int | None, done: int):
        self._batches = batches
        self._length = length
        self._done = done
        self._iterator: Any = None
        self._count = 0

    def __next__(self) -> Any:
        at = self._count % self._length if self._length else self._count
        if at == 0 or self._iterator is None:
            self.close()
            self._iterator = iter(self._batches)
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._length is None:
                raise
            if at == 0:
                raise _no_batches() from None
            raise UsageError(
                f"the iterable ended after {at} batches, and its len() is {self._length}; "
                "have its len() be the number of batches that it has."
            ) from None
        self._count += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"batches": self._count}
        if hasattr(self._iterator, "get_state"):
            state["iterator"] = self._iterator.get_state()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        if state.get("iterator") is None:
            if self._length:
                # Passes that this iterable has completed are not read again: iter() starts
                # the next one.
                passes = min(self._done, state["batches"] // self._length)
                self._count = passes * self._length
            remedy = "; an iterator with get_state() and set_state() would go there at once"
            count = state["batches"] - self._count
            _say_again(count, remedy)
            for _ in range(count):
                next(self)
            return
        self._iterator = iter(self._batches)
        if hasattr(self._iterator, "set_state"):
            self._iterator.set_state(state["iterator"])
            self._count = state["batches"]
        else:
            raise UsageError(
                f"the batches of step {state['batches']} were of an iterator with a state, "
                f"and a {type(self._iterator).__name__} has no set_state(); make the "
                "loader as it was."
            )

    def close(self) -> None:
        getattr(self._iterator, "close", lambda: None)()


def _say_again(count: int, remedy: str = "") -> None:
    if count and is_main_process():
        batches = "a batch" if count == 1 else f"{count:,} batches"
        say(f"reading {batches} again, to go on with the next one{remedy}", sys.stderr)


def _as_json(state: Any) -> Any:
    """The state of an iterator as JSON values."""
    try:
        _check_keys(state)
        return json.loads(json.dumps(state, default=_plain))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the state of the dataset's iterator is not JSON ({error}), so a checkpoint "
            "cannot keep it; return dicts, lists, numbers and strings from get_state()."
        ) from None


def _check_keys(state: Any) -> None:
    """Refuse keys that are not text, which JSON would turn into text."""
    for key in state if isinstance(state, Mapping) else ():
        if not isinstance(key, str):
            raise TypeError(f"it has the key {key!r}")
        _check_keys(state[key])
    for each in state if isinstance(state, list | tuple) else ():
        _check_keys(each)


def _plain(value: Any) -> Any:
    # The state of Grain's DataLoader is bytes, which hold JSON.
    if isinstance(value, bytes):
        return {_BYTES: value.decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"it has a {type(value).__name__}")


def _from_json(state: Any) -> Any:
    """The state that was given to `_as_json`."""

    def restored(found: dict[str, Any]) -> Any:
        return found[_BYTES].encode() if [*found] == [_BYTES] else found

    return json.loads(json.dumps(state), object_hook=restored)
