"""The entries of a batch that say how much its examples count."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._errors import UsageError

#: Weights in the loss and in metrics. No entry of a user has such a name by accident.
WEIGHT = "__weight__"
#: Weights in the loss alone.
LOSS_WEIGHT = "__loss_weight__"


def fetch_weights(batch: Any) -> dict[str, np.ndarray]:
    """The weights of a batch as NumPy arrays, if this process has all of them."""
    found = batch if isinstance(batch, Mapping) else {}
    return {
        name: np.asarray(jax.device_get(found[name]))
        for name in (WEIGHT, LOSS_WEIGHT)
        if name in found and getattr(found[name], "is_fully_addressable", True)
    }


def check_weights(batch: Any, *, whole: bool = True) -> None:
    """Refuse weights that are not finite, or negative, which would turn the loss around.

    **Arguments:**

    - `batch`: the batch, whose weights are checked if they are NumPy arrays. Their last dim
        counts the rows.
    - `whole`: whether it has the rows of all processes. The sum over some of them says
        nothing, so it is only checked if it has.

    **Raises:**

    `ValueError` if a weight is not finite, one in `"__weight__"` is negative, or the sum of
    the loss weights of a whole batch is negative.
    """
    if not isinstance(batch, Mapping):
        return
    found: dict[str, np.ndarray] = {}
    for name in (WEIGHT, LOSS_WEIGHT):
        x = batch.get(name)
        # Other things than vectors are refused elsewhere, for their shapes.
        if not isinstance(x, np.ndarray) or not x.ndim:
            continue
        found[name] = x = x.astype(np.float64)
        wrong = ~np.isfinite(x) | ((x < 0) & (name == WEIGHT))
        if np.any(wrong):
            row = np.argmax(wrong) % x.shape[-1]
            raise UsageError(
                f"{name!r} is {x[wrong][0]}, first in row {row}; give weights that are "
                f"finite and, in {WEIGHT!r}, not negative."
            )
    weight, loss_weight = found.get(WEIGHT), found.get(LOSS_WEIGHT)
    if loss_weight is not None and whole:
        counted = loss_weight if weight is None else loss_weight * weight
        if np.any(np.sum(counted, axis=-1) < 0):
            raise UsageError(
                f"the sum of {LOSS_WEIGHT!r} over a batch is negative, and dividing by it "
                "would turn the loss around; give weights whose sum is positive."
            )
