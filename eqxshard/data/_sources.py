"""Sources: datasets that return many examples at a time, in memory or mixed of others."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from .._errors import UsageError, UsageTypeError

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

        It may be called from a thread other than the one that made the source, and from
        several threads if several iterators are open. The arrays that it returns are
        copied, so it may use their memory again in the next call.

        **Arguments:**

        - `indices`: each at least 0 and less than the length.

        **Returns:**

        Arrays by name, with one row for each index.
        """
        ...


def check_source(source: Any) -> None:
    """Refuse what is not a source, and say what makes one of it."""
    if isinstance(source, Source) and not isinstance(source, type):
        return
    what = f"a {type(source).__name__}"
    parts = source if isinstance(source, list | tuple) else [source]
    if isinstance(source, type):
        what, remedy = source.__name__, "give an instance of it"
    elif isinstance(source, Mapping) or any(map(_is_array, parts)):
        remedy = "give eqxshard.data.ArraySource({'x': x, 'y': y})"
    elif isinstance(source, str):
        remedy = "open it, and give a source of what it holds"
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        remedy = "give eqxshard.data.RecordSource(it), with decode= unless it has dicts"
    elif hasattr(source, "__iter__"):
        remedy = "use eqxshard.data.from_iterator(lambda: iter(it), mesh=mesh) instead"
    else:
        remedy = "give something with __len__() and gather(indices)"
    raise UsageTypeError(f"{what} is not a source; {remedy}.")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape")


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
            raise UsageTypeError(
                f"ArraySource got a {type(arrays).__name__}; give a dict of arrays by "
                "name, such as {'x': x, 'y': y}."
            )
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


def copied(array: np.ndarray) -> np.ndarray:
    """A copy in memory that a CPU device of JAX can share, where `_empty` has some."""
    memory = _empty(array.shape, array.dtype)
    if memory is None:
        return array.copy()
    np.copyto(memory, array)
    return memory


class Mixture:
    """A source that has the examples of several, in proportion to weights.

    It is as long as it must be to have every example of every source: those of the one
    that is largest for its weight once, those of the others more often. They come source
    by source, so shuffle them, or draw them with an [`eqxshard.data.UniformSampler`][].

    **Arguments:**

    - `sources`: for each name, a source and its weight. The weights need not sum to 1. The
        examples of all must have the same entries.

    **Raises:**

    `ValueError` if there are no sources, one is empty, or a weight is not a positive
    number. While reading, `ValueError` if the examples of two sources differ in their
    entries or shapes.

    !!! Example

        ```python
        source = eqxshard.data.Mixture({"books": (books, 0.7), "code": (code, 0.3)})
        ```
    """

    def __init__(self, sources: Mapping[str, tuple[Source, int | float]]):
        if not sources:
            raise UsageError("the mixture has no sources; give at least one.")
        for name, (source, weight) in sources.items():
            if not (math.isfinite(weight) and weight > 0 and len(source)):
                raise UsageError(
                    f"{name!r} has the weight {weight} and {len(source)} examples; give a "
                    "positive weight and at least one example, or leave it out."
                )
        self._sources = {name: source for name, (source, _) in sources.items()}
        # Of the largest, exactly its length.
        each = max(len(source) / weight for source, weight in sources.values())
        counts = [max(round(each * w), len(source)) for source, w in sources.values()]
        #: The first index of each source, and where there is one more.
        self._firsts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        owners = np.searchsorted(self._firsts, indices, side="right") - 1
        found: dict[str, np.ndarray] = {}
        first, expected = "", {}
        for owner, (name, source) in enumerate(self._sources.items()):
            here = owners == owner
            if not here.any():
                continue
            part = source.gather((indices[here] - self._firsts[owner]) % len(source))
            entries = {key: (array.dtype, *array.shape[1:]) for key, array in part.items()}
            if not found:
                first, expected = name, entries
                found = {
                    key: np.empty((len(indices), *array.shape[1:]), array.dtype)
                    for key, array in part.items()
                }
            if entries != expected:
                raise UsageError(
                    f"the examples of {first!r} have {expected}, and those of {name!r} "
                    f"{entries}; give sources with the same entries."
                )
            for key, array in part.items():
                found[key][here] = array
        return found
