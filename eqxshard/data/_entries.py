"""The check that all batches have the entries of the first, which steps compile for."""

from collections.abc import Mapping

import jax
import numpy as np

from .._errors import UsageError
from ..sharding._leaves import format_array
from ..sharding._text import first_few


class FirstEntries:
    """Refuses batches whose entries are not those of the first one.

    **Arguments:**

    - `remedy`: what to do about a batch that differs.
    """

    def __init__(self, remedy: str):
        self._remedy = remedy
        #: The step and the entries of the first batch, and the entries last accepted.
        self._first: tuple[int, dict[str, str]] | None = None
        self._accepted: dict[str, tuple[np.dtype, tuple[int, ...]]] | None = None

    def check(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Raise `ValueError` if the batch of a step has other names, shapes or dtypes."""
        found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        if found == self._accepted:
            return
        now = {name: _format(array) for name, array in arrays.items()}
        if self._first is None:
            self._first = step, now
        first_step, first = self._first
        changes = [f"{name!r} is missing" for name in first if name not in now]
        changes += [f"{name!r} is new" for name in now if name not in first]
        changes += [
            f"{name!r} was {first[name]} and is {entry}"
            for name, entry in now.items()
            if first.get(name, entry) != entry
        ]
        if changes:
            raise UsageError(
                f"the batch of step {step} is not like that of step {first_step}: "
                f"{first_few(changes)}; {self._remedy}."
            )
        self._accepted = found


def _format(array: np.ndarray) -> str:
    # Devices have int32 for int64, unless jax_enable_x64 is on.
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return format_array(jax.ShapeDtypeStruct(array.shape, dtype))
