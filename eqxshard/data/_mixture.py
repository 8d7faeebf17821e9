"""Mixtures: several sources as one, by weight."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from ._sources import Source


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
            raise ValueError("the mixture has no sources; give at least one.")
        for name, (source, weight) in sources.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"the weight of {name!r} is {weight}; give a positive number, or leave "
                    "the source out."
                )
            if not len(source):
                raise ValueError(f"the source {name!r} is empty; leave it out.")
        self._sources = {name: source for name, (source, _) in sources.items()}
        # Of the largest, exactly its length.
        each = max(len(source) / weight for source, weight in sources.values())
        counts = [max(round(each * w), len(source)) for source, w in sources.values()]
        #: The first index of each source, and where there is one more.
        self._firsts = np.cumsum([0, *counts])

    @property
    def counts(self) -> dict[str, int]:
        """How many of the examples are of each source."""
        return dict(zip(self._sources, np.diff(self._firsts).tolist()))

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        owners = np.searchsorted(self._firsts, indices, side="right") - 1
        found: dict[str, np.ndarray] = {}
        seen = ""
        for owner, (name, source) in enumerate(self._sources.items()):
            here = owners == owner
            if not here.any():
                continue
            part = source.gather((indices[here] - self._firsts[owner]) % len(source))
            if not found:
                seen = name
                found = {
                    key: np.empty((len(indices), *array.shape[1:]), array.dtype)
                    for key, array in part.items()
                }
            _check_alike(seen, found, name, part)
            for key, array in part.items():
                found[key][here] = array
        return found


def _check_alike(
    first: str, found: dict[str, np.ndarray], second: str, part: dict[str, np.ndarray]
) -> None:
    ours, theirs = (
        {key: f"{array.dtype}{list(array.shape[1:])}" for key, array in arrays.items()}
        for arrays in (found, part)
    )
    if ours != theirs:
        raise ValueError(
            f"the examples of {first!r} have {ours}, and those of {second!r} {theirs}; "
            "give sources with the same entries."
        )
