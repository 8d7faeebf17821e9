"""Values per example: their weights, and their sums over a batch."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from ..sharding._mesh import batch_sharding
from ..sharding._placement import filter_shard
from ..transforms._dtypes import at_least_float32


def has_weight(batch: PyTree) -> bool:
    """Whether a batch says how much each of its examples counts."""
    return isinstance(batch, Mapping) and "weight" in batch


def example_weights(batch: PyTree) -> Float[Array, " batch"]:
    """How much each example of a batch counts: 1, unless the batch says otherwise."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if not has_weight(batch):
        return jnp.ones(rows, jnp.float32)
    if batch["weight"].shape != (rows,):
        raise ValueError(
            f"the batch's 'weight' has shape {batch['weight'].shape} for {rows} examples; "
            "give one number per example, or use another name."
        )
    return batch["weight"].astype(jnp.float32)


def sum_over_examples(
    values: Mapping[str, Any], batch: PyTree, mesh: Mesh
) -> dict[str, Float[Array, ""]]:
    """Sum values over a batch by weight; a scalar is taken for the mean.

    An example of weight 0 does not count, not even if its value is nan.
    """
    weight, sums = example_weights(batch), {}
    for name, value in values.items():
        if not eqx.is_array_like(value):
            raise TypeError(
                f"{name} is a {type(value).__name__}; return an array with one value per "
                "example, or a scalar."
            )
        value = jnp.asarray(value)
        if value.shape not in ((), weight.shape):
            raise ValueError(
                f"{name} has shape {value.shape} for a batch of {weight.shape[0]}; return "
                f"one value per example, of shape {weight.shape}, or a scalar."
            )
        if value.shape:
            value = filter_shard(value, batch_sharding(mesh))
        # Sums of many need float32 at least.
        if not jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(jnp.float32)
        value = at_least_float32(value)
        weighted = value * weight.astype(value.dtype)
        sums[name] = jnp.sum(jnp.where(weight == 0, 0, weighted))
    return sums


def check_metric_names(what: str, values: Any, *reserved: str) -> None:
    """Raise unless `values` is a dict of metrics, none with a name of the step's own."""
    if not isinstance(values, Mapping):
        kind = "an array" if isinstance(values, jax.Array) else f"a {type(values).__name__}"
        raise TypeError(f"{what} is {kind}; return a dict of metrics by name.")
    for name in reserved:
        if name in values:
            raise ValueError(
                f"a metric is named {name!r}, which the step itself reports; give it "
                "another name, or leave it out."
            )
