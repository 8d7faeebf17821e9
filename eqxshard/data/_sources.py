"""Sources: where examples come from, many at a time."""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike


@runtime_checkable
class Source(Protocol):
    """A dataset that gives many examples in one call.

    One call per example would cost more than the example: reading 256 small images
    takes about 20 microseconds in one call, and some milliseconds in 256 of them.

    !!! Example

        ```python
        class Squares:
            def __len__(self):
                return 1_000_000

            def gather(self, indices):
                return {"x": indices, "y": indices**2}
        ```
    """

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in their order, which may repeat.

        It may be called from another thread than the one that made the source. Arrays
        that it returned are not to change afterwards.

        **Arguments:**

        - `indices`: each from 0 to below the length.

        **Returns:**

        Arrays by name, whose first dim has the size of `indices`.
        """
        ...


class ArraySource:
    """Arrays in memory, whose first dim counts the examples.

    **Arguments:**

    - `arrays`: arrays by name, of equal length. Those of NumPy are not copied; others,
        and lists, are made into NumPy's.

    **Raises:**

    `TypeError` if they are not given by name. `ValueError` if there is no array, or one
    without examples' dim, or if their lengths differ.

    !!! Example

        ```python
        source = eqxshard.data.ArraySource({"image": images, "label": labels})
        ```
    """

    def __init__(self, arrays: Mapping[str, ArrayLike]):
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"ArraySource got a {type(arrays).__name__}; give a dict of arrays by "
                "name, such as {'x': x, 'y': y}."
            )
        if not arrays:
            raise ValueError("ArraySource got no arrays; give at least one, by name.")
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in self.arrays.items():
            if array.ndim == 0:
                raise ValueError(
                    f"{name!r} is a scalar, and has no examples; give an array whose first "
                    "dim counts them."
                )
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name!r} has {n:,}" for name, n in lengths.items())
            raise ValueError(
                f"the arrays differ in length: {sizes}; give as many rows in each."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in their order, which may repeat."""
        return {name: _gather(array, indices) for name, array in self.arrays.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name}: {array.dtype}{list(array.shape[1:]) or ''}"
            for name, array in self.arrays.items()
        )
        return f"ArraySource({len(self):,} x {{{shapes}}})"


def _gather(array: np.ndarray, indices: Int[np.ndarray, " n"]) -> np.ndarray:
    # np.take costs two thirds of indexing, but copies all of an array that is not
    # contiguous.
    return np.take(array, indices, axis=0) if array.flags.c_contiguous else array[indices]


@runtime_checkable
class Records(Protocol):
    """Examples that are read one by one, such as `grain.sources.ArrayRecordDataSource`."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One example."""
        ...


class RecordSource:
    """Examples that are read one by one, such as files, or records of an ArrayRecord.

    A batch's examples are read in threads, each its part of them: at once where `records`
    has the method `__getitems__(indices)`, as those of Grain and of PyTorch may. Where
    reading them is work in Python, rather than waiting for a disk, more is gained by the
    `workers` of [`eqxshard.Loader`][].

    **Arguments:**

    - `records`: what gives an example for an index: a source of Grain or of PyTorch, or
        any other with `__len__` and `__getitem__`.
    - `decode`: called with what `records` gives, returns a dict of arrays and numbers;
        by default it is one already.
    - `threads`: how many examples to read at a time.

    **Raises:**

    `TypeError` if `records` has no length or no indices; `ValueError` if `threads` is not
    positive. While reading, `TypeError` if an example is not a dict, and `ValueError` if
    examples have other names or shapes than those beside them.

    !!! Example

        ```python
        def decode(record):
            image, label = json.loads(record)
            return {"image": np.uint8(image), "label": label}


        files = grain.sources.ArrayRecordDataSource(sorted(glob("train-*.arrayrecord")))
        source = eqxshard.data.RecordSource(files, decode)
        ```
    """

    def __init__(
        self,
        records: Records,
        decode: Callable[[Any], Mapping[str, Any]] | None = None,
        *,
        threads: int = 16,
    ):
        if not isinstance(records, Records):
            raise TypeError(
                f"a {type(records).__name__} cannot be read by index; give something with "
                "__len__() and __getitem__(index)."
            )
        if threads < 1:
            raise ValueError(f"threads={threads} read nothing; use 1 or more.")
        self._records = records
        self._decode = decode
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def __len__(self) -> int:
        return len(self._records)

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in their order, which may repeat."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "eqxshard-records")
        parts = np.array_split(indices, min(self._threads, len(indices)))
        examples = list(itertools.chain.from_iterable(self._pool.map(self._read, parts)))
        names = examples[0].keys()
        for index, example in zip(indices, examples):
            if example.keys() != names:
                raise ValueError(
                    f"example {index} has the entries {sorted(example)}, and another has "
                    f"{sorted(names)}; give all the same."
                )
        return {name: _stack(name, indices, examples) for name in names}

    def _read(self, part: Int[np.ndarray, " n"]) -> list[Mapping[str, Any]]:
        indices = part.tolist()
        together = getattr(self._records, "__getitems__", None)
        if together is not None:
            records = together(indices)
        else:
            records = [self._records[index] for index in indices]
        return [self._example(i, record) for i, record in zip(indices, records)]

    def _example(self, index: int, example: Any) -> Mapping[str, Any]:
        if self._decode is not None:
            example = self._decode(example)
        if not isinstance(example, Mapping):
            raise TypeError(
                f"example {index} is a {type(example).__name__}; use decode= to make a "
                "dict of arrays of it."
            )
        return example


def _stack(
    name: str, indices: Int[np.ndarray, " n"], examples: list[Mapping[str, Any]]
) -> np.ndarray:
    arrays = [np.asarray(example[name]) for example in examples]
    for index, array in zip(indices, arrays):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"{name!r} is of shape {array.shape} in example {index}, and of shape "
                f"{arrays[0].shape} in example {indices[0]}; use decode= to make all the "
                "same, by padding or cropping."
            )
    return np.stack(arrays)
