"""Sources: where examples come from, many at a time."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

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
