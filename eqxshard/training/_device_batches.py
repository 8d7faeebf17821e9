"""Batches that a step gathers for itself, from a dataset on its devices."""

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..sharding._batch_weights import WEIGHT
from ..sharding._mesh import batch_sharding
from ..sharding._placement import filter_shard


class DeviceBatches(eqx.Module):
    """Batches that a step gathers for itself, from a dataset that is on its devices.

    [`eqxshard.Loader.stacked`][] makes these for `train_step.many` and `eval_step.many`.

    - `examples`: the dataset, whole on each device.
    - `rows`: which examples each step takes.
    - `weight`: if the loader pads, how much each of them counts.
    - `count`: the number of steps to take; there is room for `len(rows)`.
    """

    examples: dict[str, Array]
    rows: Int[Array, "steps batch"]
    weight: Float[Array, "steps batch"] | None
    count: Int[Array, ""]

    def batch(self, step: Int[Array, ""], mesh: Mesh) -> dict[str, Array]:
        """The batch of one of the steps."""
        rows = self.rows[step]
        batch = {name: jnp.take(x, rows, axis=0) for name, x in self.examples.items()}
        if self.weight is not None:
            weight = self.weight[step]
            if WEIGHT in batch:
                weight = jnp.where(weight == 0, weight, batch[WEIGHT])
            batch[WEIGHT] = weight
        return filter_shard(batch, batch_sharding(mesh))
