"""Sources: datasets of arrays, which return many examples in one call."""

import math
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from .._errors import UsageError, UsageTypeError
from ..sharding._leaves import check_not_masked

#: In bytes: the alignment of NumPy memory that a CPU device can share, and the size below
#: which JAX copies an array at once.
_ALIGNMENT = 64
_SMALL_BYTES = 2**16


@runtime_checkable
class Source(Protocol):
    """A dataset that returns many examples in one call.

    It may also have the `name`, the `unit` and the `warning` of an
    [`eqxshard.data.ArraySource`][], which the logs and summaries of [`eqxshard.train`][]
    show. A source that reads another hands them on.

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

        It may be called from a thread other than the one that made the source, and from
        several threads if several iterators are open. The arrays that it returns are
        copied, so it may use their memory again in the next call.

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
    - `unit`: what the logs and summaries call the examples, such as `images`.
    - `warning`: a warning that they show, such as that the data are synthetic.

    **Raises:**

    `TypeError` if the arrays have no names, or one is masked. `ValueError` if there are
    none, one is a scalar, or their lengths differ.

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
            raise UsageTypeError(
                f"ArraySource got a {type(arrays).__name__}; give a dict of arrays by "
                "name, such as {'x': x, 'y': y}."
            )
        for key, array in arrays.items():
            check_not_masked(repr(key), array)
        self.arrays = {key: np.asarray(array) for key, array in arrays.items()}
        shapes = {key: array.shape for key, array in self.arrays.items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or () in lengths:
            raise UsageError(
                f"the arrays have the shapes {shapes}; give at least one array, and all of "
                "them the same first dim, which counts the examples."
            )

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        return {name: _gather(array, indices) for name, array in self.arrays.items()}


def _gather(array: np.ndarray, indices: Int[np.ndarray, " n"]) -> np.ndarray:
    # np.take takes two thirds of the time of indexing, but would copy the whole of an
    # array that is not contiguous.
    if not array.flags.c_contiguous:
        return array[indices]
    rows = empty((len(indices), *array.shape[1:]), array.dtype)
    if rows is None or indices.min() < 0 or indices.max() >= len(array):
        return np.take(array, indices, axis=0)
    # With mode="raise", np.take would fill memory of its own first.
    return np.take(array, indices, axis=0, out=rows, mode="clip")


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """Memory that a CPU device of JAX can share, or `None` if it copies the array at once.

    It can share memory that starts at a multiple of 64 bytes; NumPy's starts at one of 16.
    Other large arrays are copied by a thread, which takes longer than gathering small
    images.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _SMALL_BYTES or dtype.hasobject:
        return None
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % _ALIGNMENT)


def copied(array: np.ndarray) -> np.ndarray:
    """A copy in memory that a CPU device of JAX can share, if that is worth it."""
    memory = empty(array.shape, array.dtype)
    if memory is None:
        return array.copy()
    np.copyto(memory, array)
    return memory


def is_map_dataset(source: Any) -> bool:
    """True for a `grain.MapDataset`. It does not import Grain to find out."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(source, grain.MapDataset)


def is_iter_dataset(source: Any) -> bool:
    """True for a `grain.IterDataset`."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(source, grain.IterDataset)


def as_source(source: Any) -> Source:
    """A source, made of a dict of arrays if necessary; refuse others, with a remedy."""
    if isinstance(source, Mapping):
        return ArraySource(source)
    if isinstance(source, Source) and not isinstance(source, type):
        return source
    if is_map_dataset(source):
        raise UsageTypeError(
            f"a {type(source).__name__} gives examples one by one; read them into a dict "
            "of arrays."
        )
    what = f"a {type(source).__name__}"
    parts = source if isinstance(source, list | tuple) else [source]
    if isinstance(source, type):
        what, remedy = source.__name__, "give an instance of it"
    elif any(map(_is_array, parts)):
        remedy = "give a dict of arrays, such as {'x': x, 'y': y}"
    elif isinstance(source, str):
        remedy = "open it, and give what it holds"
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        remedy = (
            "give grain.MapDataset.source(it), with .map(...) to make each example a dict "
            "of arrays; or, if it has whole batches, leave batch_size= out"
        )
    elif hasattr(source, "__iter__"):
        remedy = (
            "it gives batches of its own, so leave batch_size= out; of a grain.IterDataset "
            "of examples, make batches with .batch(n)"
        )
    else:
        remedy = "give something with __len__() and gather(indices)"
    raise UsageTypeError(f"{what} is not a dataset of examples; {remedy}.")


def check_batches(source: Any) -> None:
    """Refuse objects that cannot be iterated for batches, again and again."""
    if isinstance(source, Source | Mapping | str | type):
        raise UsageTypeError(
            f"the loader makes the batches of a {type(source).__name__} itself; give it "
            "batch_size=."
        )
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise UsageTypeError(
            f"a {type(source).__name__} has neither examples nor batches; give a dict of "
            "arrays with batch_size=, a Grain dataset, or an iterable of batches."
        )
    if hasattr(source, "__next__"):
        raise UsageTypeError(
            f"a {type(source).__name__} can be read only once, and a loader starts again "
            "after a stop; give an object whose __iter__ makes a new iterator each time."
        )


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape")
