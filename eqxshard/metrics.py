"""`Metrics`: weighted sums, on device until somebody reads them."""

from collections.abc import Mapping, Sequence

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int


class Metrics(eqx.Module):
    """What one step, or several, measured: sums over examples, and their weights.

    Sums rather than means, so that steps of different weight add up to the exact mean
    over examples. Everything stays on the devices until it is read, by
    [`eqxshard.Metrics.compute`][].

    - `totals`: for each name the sum over examples of weight times value; one per step
        where several steps are stacked.
    - `weight`: the sum of the weights, that is the number of examples that count.
    - `nonfinite`: 1 for a step whose loss or gradients were not finite, 0 otherwise.
    """

    totals: Mapping[str, Float[Array | np.ndarray, "*steps"]]
    weight: Float[Array | np.ndarray, "*steps"]
    nonfinite: Int[Array | np.ndarray, "*steps"]

    def __getitem__(self, name: str) -> Float[Array | np.ndarray, "*steps"]:
        """The mean over examples of one metric, of each step, without waiting for it."""
        # NumPy, unlike JAX, would warn of the nan where no example counted.
        with np.errstate(invalid="ignore"):
            return self.totals[name] / self.weight

    def compute(self) -> dict[str, float]:
        """Wait for the values, and read the means over all examples and steps.

        **Returns:**

        The mean of each metric over the steps that were finite; `nan` where no example
        counted. `"nonfinite"` is the number of the others, and is there only if there
        were any.
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

        - `parts`: metrics with the same names, at least one.

        **Returns:**

        An [`eqxshard.Metrics`][] of NumPy arrays, with one entry per step.

        **Raises:**

        `ValueError` if there is nothing to stack, or the names differ.
        """
        if not parts:
            raise ValueError("there are no metrics to stack; take at least one step.")
        host = jax.device_get(list(parts))
        return jax.tree.map(
            lambda *leaves: np.concatenate([np.ravel(x) for x in leaves]), *host
        )
