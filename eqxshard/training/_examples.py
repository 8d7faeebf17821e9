"""`Metrics`: sums over examples, which stay on the devices until they are read.

Here are also the weights of a batch's examples, the sums over a batch by these weights, and
the checks of the values that a user's function returns.
"""

import functools as ft
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import dce_jaxpr
from ..sharding._batch_weights import LOSS_WEIGHT, WEIGHT
from ..sharding._mesh import batch_sharding
from ..sharding._placement import filter_shard
from ..sharding._spec import AnyMesh
from ..transforms._dtypes import at_least_float32


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
    - `weights`: by name, the sums of the weights of metrics that have weights of their own:
        the loss has, where the batch has a `"__loss_weight__"`.
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
            # Scaled to the weight of the first, in case the batches differed.
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


def has_entry(batch: PyTree, name: str) -> bool:
    """True if a batch is a dict with an entry of this name."""
    return isinstance(batch, Mapping) and name in batch


def example_weights(batch: PyTree) -> Float[Array, " batch"]:
    """How much each example of a batch counts: 1, unless the batch says otherwise."""
    return _read_weights(batch, WEIGHT)


def example_loss_weights(batch: PyTree) -> Float[Array, " batch"]:
    """How much the loss of each example counts."""
    return example_weights(batch) * _read_weights(batch, LOSS_WEIGHT)


def total_weight(weights: Float[Array, " batch"]) -> Float[Array, ""]:
    """The sum of the examples' weights; nan if one of them is negative."""
    return jnp.where(jnp.any(weights < 0), jnp.nan, jnp.sum(weights))


def own_weights(batch: PyTree) -> dict[str, Float[Array, ""]]:
    """The sum of the loss weights, by the name `loss`; empty if the batch has none.

    A negative sum, which would turn the loss around, is returned as nan.
    """
    if not has_entry(batch, LOSS_WEIGHT):
        return {}
    total = jnp.sum(example_loss_weights(batch))
    return {"loss": jnp.where(total < 0, jnp.nan, total)}


def is_step(batch: PyTree) -> Bool[Array, ""] | None:
    """True if the loss of any example counts; `None` if the batch has no weights.

    If none counts, there is nothing to learn from the batch, but decay and momentum would
    still move the weights.
    """
    if not is_weighted(batch):
        return None
    return jnp.any(example_loss_weights(batch) != 0)


def _read_weights(batch: PyTree, name: str) -> Float[Array, " batch"]:
    rows = jax.tree.leaves(batch)[0].shape[0]
    if not has_entry(batch, name):
        return jnp.ones(rows, jnp.float32)
    if batch[name].shape != (rows,):
        raise UsageError(
            f"the batch's {name!r} has shape {batch[name].shape} for {rows} examples; "
            "give one number per example, or use another name."
        )
    return batch[name].astype(jnp.float32)


def mask_padding(batch: PyTree) -> PyTree:
    """Replace values that are not finite by 0, in examples of weight 0.

    Their losses are multiplied by 0, and so are the derivatives that go backward from
    there; but 0 times the derivative of nan is nan.
    """
    if not has_entry(batch, WEIGHT):
        return batch
    padding = example_weights(batch) == 0

    def mask(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        rows = jnp.expand_dims(padding, range(1, leaf.ndim))
        return jnp.where(rows & ~jnp.isfinite(leaf), jnp.zeros((), leaf.dtype), leaf)

    return jax.tree.map(mask, batch)


def sum_over_examples(
    values: Mapping[str, Any], batch: PyTree, mesh: AnyMesh
) -> dict[str, Float[Array, " *value"]]:
    """Sum values over a batch by weight; a scalar is taken for the mean.

    An example of weight 0 does not count, not even if its value is nan. The value named
    `loss` has weights of its own, and one number per example.
    """
    weight, loss_weight = example_weights(batch), example_loss_weights(batch)
    return {
        name: _sum(name, value, loss_weight if name == "loss" else weight, mesh)
        for name, value in values.items()
    }


def _sum(
    name: str, value: Any, weight: Float[Array, " batch"], mesh: AnyMesh
) -> Float[Array, " *value"]:
    if not eqx.is_array_like(value) or jnp.iscomplexobj(value):
        what = getattr(value, "dtype", type(value).__name__)
        raise UsageTypeError(
            f"{name} is {what}; return an array with one real number per example, or a "
            "scalar."
        )
    value, rows = jnp.asarray(value), weight.shape[0]
    if value.shape and value.shape[: None if name == "loss" else 1] != (rows,):
        raise UsageError(
            f"{name} has shape {value.shape} for a batch of {rows}; return one value per "
            "example, in the first dim (a loss has no other), or a scalar."
        )
    if value.shape:
        value = filter_shard(value, batch_sharding(mesh))
        weight = jnp.expand_dims(weight, range(1, value.ndim))
    # Sums over many examples need float32 at least.
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    value = at_least_float32(value) if is_float else value.astype(jnp.float32)
    weighted = value * weight.astype(value.dtype)
    return jnp.sum(jnp.where(weight == 0, 0, weighted), axis=0)


def is_weighted(batch: PyTree) -> bool:
    """True if a batch says how much its examples count."""
    return has_entry(batch, WEIGHT) or has_entry(batch, LOSS_WEIGHT)


def check_scalars(
    values: Mapping[str, Any],
    measure: Callable[[PyTree], Mapping[str, Any]],
    batch: PyTree,
    accumulate: int = 1,
) -> None:
    """Refuse scalars that are computed from examples without regard to their weights.

    A step takes the mean of other scalars over microbatches, which a warning says.

    **Arguments:**

    - `values`: the values that the user's function returned for the batch.
    - `measure`: computes the same from a batch.
    - `batch`: the batch.
    - `accumulate`: the number of microbatches.
    """
    names = [name for name, x in values.items() if isinstance(x, jax.Array) and not x.shape]
    if not names:
        return
    wanted = lambda batch: [measure(batch)[name] for name in names]  # noqa: E731
    jaxpr = jax.make_jaxpr(wanted)(batch).jaxpr
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    entries = [getattr(path[0], "key", path[0]) if path else "" for path in paths]
    found = []
    for name in names:
        _, is_used = dce_jaxpr(jaxpr, [name == other for other in names])
        used = {entry for entry, is_used in zip(entries, is_used) if is_used}
        if used:
            found.append(name)
        for entry in (WEIGHT, LOSS_WEIGHT) if name == "loss" else (WEIGHT,):
            if used and entry not in used and has_entry(batch, entry):
                raise UsageError(
                    f"{name} is one number for the batch and ignores its {entry!r}; return "
                    "one value per example; or, if it is the loss, leave the padded rows "
                    "out with remainder='drop'."
                )
    if found and accumulate > 1:
        warnings.warn(
            f"{', '.join(sorted(found))}: one number for a batch, of which accumulate="
            f"{accumulate} takes the mean over microbatches. That is the number for the "
            "whole batch only if it is a plain mean over examples; otherwise, such as for "
            "a mean over tokens, return one value per example, and put the weight of each "
            f"into the batch's {LOSS_WEIGHT!r}.",
            stacklevel=2,
        )


def check_metric_names(what: str, values: Any, *reserved: str) -> None:
    """Raise unless `values` is a dict of metrics, none with a name of the step's own."""
    if not isinstance(values, Mapping):
        kind = "an array" if isinstance(values, jax.Array) else f"a {type(values).__name__}"
        raise UsageTypeError(f"{what} is {kind}; return a dict of metrics by name.")
    for name in reserved:
        if name in values:
            raise UsageError(
                f"a metric is named {name!r}, which the step itself reports; give it "
                "another name, or leave it out."
            )
