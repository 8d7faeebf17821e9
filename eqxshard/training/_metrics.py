"""`Metrics`: weighted sums that stay on the devices until they are read."""

import functools as ft
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._errors import UsageError


class Metrics(eqx.Module):
    """The metrics of one step, or of several: sums over examples, and their weights.

    Sums, not means, so that steps of different weight add up to the exact mean over
    examples. Everything stays on the devices until [`eqxshard.training.Metrics.compute`][]
    reads it.

    - `totals`: for each name the sum over examples of weight times value, a number or an
        array (such as a confusion matrix); one entry per step if several steps are
        stacked.
    - `weight`: the sum of the weights: the number of examples, padding excluded.
    - `nonfinite`: 1 for a step whose loss, gradients or update were not finite, else 0.
    - `weights`: by name, the sum of the weights of metrics that have weights of their own:
        of the loss, where the batch has a `"__loss_weight__"`.
    """

    totals: Mapping[str, Float[Array | np.ndarray, "*steps_and_value"]]
    weight: Float[Array | np.ndarray, "*steps"]
    nonfinite: Int[Array | np.ndarray, "*steps"]
    weights: Mapping[str, Float[Array | np.ndarray, "*steps"]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Float[Array | np.ndarray, "*steps_and_value"]:
        """The mean of one metric over examples, for each step, without waiting for it."""
        total, weight = self.totals[name], self.weights.get(name, self.weight)
        # NumPy, unlike JAX, would warn about the nan if no example counts.
        with np.errstate(invalid="ignore"):
            return total / weight.reshape(_like(total, weight))

    def compute(self) -> dict[str, Any]:
        """Wait for the values, and take their means over all examples and steps.

        **Returns:**

        The mean of each metric over the finite steps, a float or an array; `nan` if no
        example counts. If other steps occurred, `"nonfinite"` is their number.
        """
        host = jax.device_get(self)
        finite = host.nonfinite == 0
        steps = tuple(range(np.ndim(finite)))

        def mean(name: str, total: np.ndarray) -> Any:
            weights = host.weights.get(name, host.weight)
            weight = np.sum(weights, where=finite, dtype=np.float64)
            where = np.reshape(finite, _like(total, finite))
            summed = np.sum(total, axis=steps, where=where, dtype=np.float64)
            with np.errstate(invalid="ignore"):
                out = np.where(weight == 0, np.nan, summed) / weight
            return out if out.shape else float(out)

        means = {name: mean(name, np.asarray(x)) for name, x in host.totals.items()}
        nonfinite = int(np.sum(host.nonfinite))
        return means | ({"nonfinite": float(nonfinite)} if nonfinite else {})

    @staticmethod
    def join(**parts: "Metrics") -> "Metrics":
        """The metrics of several models, stepped on the same batch, as those of one step.

        **Arguments:**

        - `parts`: the metrics of each model, by its name.

        **Returns:**

        An [`eqxshard.training.Metrics`][] with the names `model/metric`, which is not
        finite where one of the parts is not.

        **Raises:**

        `ValueError` if there are no parts.

        !!! Example

            ```python
            metrics = eqxshard.training.Metrics.join(generator=g_metrics, critic=c_metrics)
            metrics["generator/loss"]
            ```
        """
        if not parts:
            raise UsageError(
                "there are no metrics to join; give those of one model or more."
            )
        weight = next(iter(parts.values())).weight
        totals, weights = {}, {}
        for part, metrics in parts.items():
            weights |= {f"{part}/{name}": x for name, x in metrics.weights.items()}
            # Each by the weight of the first, should batches have differed.
            ratio = jnp.where(weight == 0, 0, weight / metrics.weight)
            for name, total in metrics.totals.items():
                if name not in metrics.weights:
                    total = total * ratio.reshape(_like(total, ratio))
                totals[f"{part}/{name}"] = total
        bad = ft.reduce(jnp.maximum, [metrics.nonfinite for metrics in parts.values()])
        return Metrics(totals, weight, bad, weights)

    @staticmethod
    def stack(parts: Sequence["Metrics"]) -> "Metrics":
        """Wait for the metrics of several steps, and stack them on the host.

        **Arguments:**

        - `parts`: at least one, all with the same names.

        **Returns:**

        An [`eqxshard.training.Metrics`][] of NumPy arrays, with one entry per step.

        **Raises:**

        `ValueError` if `parts` is empty, or the names differ.
        """
        if not parts:
            raise UsageError("there are no metrics to stack; take at least one step first.")
        host = jax.device_get(list(parts))
        # Only some batches may say how much the loss of an example counts.
        own = {name for m in host for name in m.weights}
        host = [
            replace(m, weights={name: m.weights.get(name, m.weight) for name in own})
            for m in host
        ]
        rows = [
            jax.tree.map(lambda x, m=m: np.reshape(x, (-1, *_value(x, m.weight))), m)
            for m in host
        ]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


def _value(total: Any, steps: Any) -> tuple[int, ...]:
    """The shape of a metric for one step, given an array with an entry for each step."""
    return np.shape(total)[np.ndim(steps) :]


def _like(total: Any, steps: Any) -> tuple[int, ...]:
    """The shape that broadcasts an array with an entry for each step to a metric's."""
    return (*np.shape(steps), *(1 for _ in _value(total, steps)))
