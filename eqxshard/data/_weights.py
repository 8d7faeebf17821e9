"""The entries of a batch that say how much its examples count."""

from collections.abc import Mapping
from typing import Any

import numpy as np

#: In the loss and in metrics. No entry of a user's own has such a name by accident.
WEIGHT = "__weight__"
#: In the loss alone.
LOSS_WEIGHT = "__loss_weight__"


def part_to_check(arrays: Mapping[str, np.ndarray], whole: bool) -> dict[str, np.ndarray]:
    """The weights of a process's rows, with those of the loss only if they are whole.

    Of a part of a batch, the sum of these says nothing.
    """
    names = (WEIGHT, LOSS_WEIGHT) if whole else (WEIGHT,)
    return {name: arrays[name] for name in names if name in arrays}


def fetch_weights(batch: Any) -> dict[str, np.ndarray]:
    """The weights of a batch as NumPy arrays, if this process has all of them."""
    found = batch if isinstance(batch, Mapping) else {}
    return {
        name: np.asarray(found[name])
        for name in (WEIGHT, LOSS_WEIGHT)
        if name in found and getattr(found[name], "is_fully_addressable", True)
    }


def check_weights(batch: Any) -> None:
    """Refuse weights that are negative, which would turn the loss around, or not finite.

    **Arguments:**

    - `batch`: of which NumPy arrays are looked at. Rows are the last dim of weights.

    **Raises:**

    `ValueError` if a weight is negative or not finite, or the sum of a batch's loss
    weights is negative.
    """
    if not isinstance(batch, Mapping) or not (WEIGHT in batch or LOSS_WEIGHT in batch):
        return
    found = [batch.get(name) for name in (WEIGHT, LOSS_WEIGHT)]
    # What is not an array of numbers is refused by its shape.
    weight, loss_weight = (
        x.astype(np.float64) if isinstance(x, np.ndarray) and x.ndim else None
        for x in found
    )
    for name, x in ((WEIGHT, weight), (LOSS_WEIGHT, loss_weight)):
        if x is not None and not np.all(np.isfinite(x)):
            row = np.argmin(np.isfinite(x)) % x.shape[-1]
            raise ValueError(
                f"{name!r} is not finite, first in row {row}, and would make the loss nan; "
                "give that example a weight of 0."
            )
    if weight is not None and np.any(weight < 0):
        row = np.argmax(weight < 0) % weight.shape[-1]
        raise ValueError(
            f"{WEIGHT!r} is {weight.min()} at its lowest, first negative in row {row}, and "
            "no example counts less than nothing; give weights of 0 or more."
        )
    if loss_weight is not None:
        counted = loss_weight if weight is None else loss_weight * weight
        if np.any(np.sum(counted, axis=-1) < 0):
            raise ValueError(
                f"the sum of {LOSS_WEIGHT!r} over a batch is negative, and dividing by it "
                "would turn the loss around; give weights whose sum is positive."
            )
