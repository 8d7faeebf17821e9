"""`Metrics`: weighted sums that stay on the devices until they are read."""

from collections.abc import Mapping, Sequence

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int


class Metrics(eqx.Module):
    """The metrics of one step, or of several: sums over examples, and their weights.

    Sums, not means, so that steps of different weight add up to the exact mean over
    examples. Everything stays on the devices until [`eqxshard.Metrics.compute`][] reads
    it.

    - `totals`: for each name the sum over examples of weight times value; one entry per
        step if several steps are stacked.
    - `weight`: the sum of the weights: the number of examples, padding excluded.
    - `nonfinite`: 1 for a step whose loss or gradients were not finite, else 0.
    """

    totals: Mapping[str, Float[Array | np.ndarray, "*steps"]]
    weight: Float[Array | np.ndarray, "*steps"]
    nonfinite: Int[Array | np.ndarray, "*steps"]

    def __getitem__(self, name: str) -> Float[Array | np.ndarray, "*steps"]:
        """The mean of one metric over examples, for each step, without waiting for it."""
        # NumPy, unlike JAX, would warn about the nan if no example counts.
        with np.errstate(invalid="ignore"):
            return self.totals[name] / self.weight

    def compute(self) -> dict[str, float]:
        """Wait for the values, and take their means over all examples and steps.

        **Returns:**

        The mean of each metric over the finite steps; `nan` if no example counts. If
        other steps occurred, `"nonfinite"` is their number.
        """
        host = jax.device_get(self)
        finite = host.nonfinite == 0
        weight = np.sum(host.weight, where=finite, dtype=np.float64)
        means = {
            name: float(np.sum(total, where=finite, dtype=np.float64) / weight)
            if weight
            else float("nan")
            for name, total in host.totals.items()
        }
        nonfinite = int(np.sum(host.nonfinite))
        return means | ({"nonfinite": float(nonfinite)} if nonfinite else {})

    @staticmethod
    def stack(parts: Sequence["Metrics"]) -> "Metrics":
        """Wait for the metrics of several steps, and stack them on the host.

        **Arguments:**

        - `parts`: at least one, all with the same names.

        **Returns:**

        An [`eqxshard.Metrics`][] of NumPy arrays, with one entry per step.

        **Raises:**

        `ValueError` if `parts` is empty, or the names differ.
        """
        if not parts:
            raise ValueError("there are no metrics to stack; take at least one step first.")
        host = jax.device_get(list(parts))
        return jax.tree.map(
            lambda *leaves: np.concatenate([np.ravel(x) for x in leaves]), *host
        )
