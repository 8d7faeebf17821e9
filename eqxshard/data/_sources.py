"""Sources: datasets that return many examples at a time."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

#: In bytes: where memory starts that JAX shares with NumPy, and what it copies at once.
_ALIGNMENT = 64
_SMALL_BYTES = 2**16


@runtime_checkable
class Source(Protocol):
    """A dataset that returns many examples in one call.

    One call per example would cost more than the example: reading 256 small images takes
    about 20 microseconds in one call, and several milliseconds in 256 calls.

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
        """The examples at some indices, in that order; indices may repeat.

        It may be called from a thread other than the one that made the source. The arrays
        that it returns must not change afterwards.

        **Arguments:**

        - `indices`: each at least 0 and less than the length.

        **Returns:**

        Arrays by name, with one row for each index.
        """
        ...


class ArraySource:
    """Arrays in memory, whose first dim counts the examples.

    **Arguments:**

    - `arrays`: arrays by name, of equal length. NumPy arrays are not copied; others, and
        lists, are converted.
    - `name`: the name of the data in the logs and summaries of [`eqxshard.train`][].
    - `unit`: their name for examples, such as `images`.
    - `warning`: a warning that they show, such as that the data are synthetic.

    **Raises:**

    `TypeError` if the arrays have no names. `ValueError` if there are none, one is a
    scalar, or their lengths differ.

    !!! Example

        ```python
        source = eqxshard.data.ArraySource({"image": images, "label": labels})
        ```
    """

    def __init__(
        self,
        arrays: Mapping[str, ArrayLike],
        *,
        name: str = "",
        unit: str = "examples",
        warning: str = "",
    ):
        self.name = name
        self.unit = unit
        self.warning = warning
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"ArraySource got a {type(arrays).__name__}; give a dict of arrays by "
                "name, such as {'x': x, 'y': y}."
            )
        if not arrays:
            raise ValueError("ArraySource got no arrays; give at least one, by name.")
        self.arrays = {key: np.asarray(array) for key, array in arrays.items()}
        for key, array in self.arrays.items():
            if array.ndim == 0:
                raise ValueError(
                    f"{key!r} is a scalar; give an array whose first dim counts examples."
                )
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{name!r} has {n:,}" for name, n in lengths.items())
            raise ValueError(
                f"the arrays differ in length: {sizes}; give each the same number of rows."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        return {name: _gather(array, indices) for name, array in self.arrays.items()}

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name}: {array.dtype}{list(array.shape[1:]) or ''}"
            for name, array in self.arrays.items()
        )
        return f"ArraySource({len(self):,} x {{{shapes}}})"


def _gather(array: np.ndarray, indices: Int[np.ndarray, " n"]) -> np.ndarray:
    # np.take takes two thirds of the time of indexing, but would copy the whole of an
    # array that is not contiguous.
    if not array.flags.c_contiguous:
        return array[indices]
    rows = _empty((len(indices), *array.shape[1:]), array.dtype)
    if rows is None or indices.min() < 0 or indices.max() >= len(array):
        return np.take(array, indices, axis=0)
    # With mode="raise", np.take would fill memory of its own first.
    return np.take(array, indices, axis=0, out=rows, mode="clip")


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """Memory that a CPU device of JAX can share, or None if it copies the array at once.

    It can share what starts at a multiple of 64 bytes, and NumPy's memory starts at one of
    16. It has a thread copy what is large, which takes longer than to gather small images.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _SMALL_BYTES or dtype.hasobject:
        return None
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % _ALIGNMENT)


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
    """Examples that are read one by one: files, an ArrayRecord, a dataset of PyTorch.

    If `records` has a method `__getitems__(indices)`, as sources of Grain and PyTorch may,
    one call of it reads all examples of a batch, or of several small ones, and threads
    share the decoding. Otherwise threads share both. If either is work in Python rather
    than waiting for a disk, the `workers` of [`eqxshard.Loader`][] help more.

    **Arguments:**

    - `records`: a source of Grain or PyTorch, or any other object with `__len__` and
        `__getitem__`.
    - `decode`: called with a record, returns a dict of arrays and numbers, or what `names`
        makes one of; by default, records must be that.
    - `names`: the names of the entries, if the examples are tuples or single arrays.
    - `threads`: the number of examples to read or decode at a time.

    **Raises:**

    `TypeError` if `records` has no length or no indices; `ValueError` if `threads` is not
    positive. While reading, `TypeError` if an example is not a dict and has no names, and
    `ValueError` if the examples of a batch differ in their names or shapes.

    !!! Example

        ```python
        def decode(record):
            image, label = json.loads(record)
            return {"image": np.uint8(image), "label": label}


        files = grain.sources.ArrayRecordDataSource(sorted(glob("train-*.arrayrecord")))
        source = eqxshard.data.RecordSource(files, decode)

        dataset = torchvision.datasets.CIFAR10(root, transform=to_tensor)
        source = eqxshard.data.RecordSource(dataset, names=("image", "label"))
        ```
    """

    def __init__(
        self,
        records: Records,
        decode: Callable[[Any], Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        threads: int = 16,
    ):
        if not isinstance(records, Records):
            raise TypeError(
                f"a {type(records).__name__} cannot be read by index; give an object with "
                "__len__() and __getitem__(index), or use eqxshard.data.from_iterator."
            )
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1.")
        self._records = records
        self._decode = decode
        self._names = names
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def __len__(self) -> int:
        return len(self._records)

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "eqxshard-records")
        items, work = indices.tolist(), self._read
        get_many = getattr(self._records, "__getitems__", None)
        if get_many is not None:
            # Not in parts: such sources have threads of their own, or read in order.
            items, work = list(zip(items, get_many(items))), self._decode_all
        size = -(-len(items) // self._threads)
        parts = (items[start : start + size] for start in range(0, len(items), size))
        examples = list(itertools.chain.from_iterable(self._pool.map(work, parts)))
        names = examples[0].keys()
        for index, example in zip(indices, examples):
            if example.keys() != names:
                raise ValueError(
                    f"example {index} has the entries {sorted(example)}, and another has "
                    f"{sorted(names)}; give all examples the same entries."
                )
        return {name: _stack(name, indices, examples) for name in names}

    def _read(self, indices: list[int]) -> list[Mapping[str, Any]]:
        return [self._example(index, self._records[index]) for index in indices]

    def _decode_all(self, records: list[tuple[int, Any]]) -> list[Mapping[str, Any]]:
        return [self._example(index, record) for index, record in records]

    def _example(self, index: int, example: Any) -> Mapping[str, Any]:
        if self._decode is not None:
            example = self._decode(example)
        if isinstance(example, Mapping):
            return example
        if self._names is None:
            raise TypeError(
                f"example {index} is a {type(example).__name__}; name its entries, such as "
                "names=('x', 'y'), or use decode= to turn it into a dict of arrays."
            )
        parts = example if isinstance(example, tuple | list) else (example,)
        if len(self._names) != len(parts):
            raise ValueError(
                f"example {index} has {len(parts)} entries, and names has "
                f"{len(self._names)}; give one name for each."
            )
        return dict(zip(self._names, parts))


def _stack(
    name: str, indices: Int[np.ndarray, " n"], examples: list[Mapping[str, Any]]
) -> np.ndarray:
    arrays = [np.asarray(example[name]) for example in examples]
    for index, array in zip(indices, arrays):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"{name!r} has shape {array.shape} in example {index}, and "
                f"{arrays[0].shape} in example {indices[0]}; pad or crop them to the same "
                "shape, in the dataset or with decode=."
            )
    shape, dtypes = arrays[0].shape, {array.dtype for array in arrays}
    out = _empty((len(arrays), *shape), arrays[0].dtype) if len(dtypes) == 1 else None
    return np.stack(arrays, out=out)
