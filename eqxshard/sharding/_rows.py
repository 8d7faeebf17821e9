"""Rows of a batch that are not finite, and their examples in the source."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..distributed import fetch_whole
from ._leaves import array_leaves, is_inexact


def describe_batch(
    batch: PyTree, examples: Sequence[int] | np.ndarray | None
) -> str | None:
    """The first entry of a batch that is not finite, and its rows; `None` if all are.

    **Arguments:**

    - `batch`: arrays, of which every process has a part.
    - `examples`: the indices in the source of the batch's examples, if known.
    """
    for path, leaf in array_leaves(batch):
        if not is_inexact(leaf):
            continue
        finite = fetch_whole(jnp.isfinite(leaf))
        bad = np.flatnonzero(~finite.reshape(finite.shape[0], -1).all(1)).tolist()
        if bad:
            return f"batch entry {path} is not finite in {name_rows(bad, examples)}"
    return None


def name_rows(bad: Sequence[int], examples: Sequence[int] | np.ndarray | None) -> str:
    """Rows of a batch, and their examples in the source."""
    some = [*bad[:8]]
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    named = f"rows {some}{more} of the batch"
    if examples is None:
        return named
    # Rows beyond these are padding.
    found = [int(examples[row]) for row in some if row < len(examples)]
    return f"{named} (examples {found} of the source)"
