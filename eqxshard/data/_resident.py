"""A dataset that is whole on every device, and batches that steps gather from it."""

from collections.abc import Generator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ..sharding._mesh import batch_sharding
from ..sharding._placement import filter_shard, from_host
from ._host import HostBatches, check_integers
from ._weights import WEIGHT


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


class ResidentDataset:
    """Puts all examples on every device once; then a batch costs only its row numbers.

    **Arguments:**

    - `host`: decides which examples make up each batch.
    - `mesh`: the mesh of the devices.
    """

    def __init__(self, host: HostBatches, mesh: Mesh):
        self.host = host
        self._mesh = mesh
        arrays = host.everything()
        check_integers(arrays)
        replicated = NamedSharding(mesh, PartitionSpec())
        self._examples: dict[str, Array] = {
            name: from_host(array.shape, replicated, array.__getitem__)
            for name, array in arrays.items()
        }
        self._gather = jax.jit(
            lambda batches: batches.batch(jnp.int32(0), mesh),
            out_shardings=batch_sharding(mesh),
        )

    def batches(self, steps: range) -> Generator[dict[str, Array], None, None]:
        """The batches of some steps, gathered one at a time."""
        for step in steps:
            yield self._gather(self.stacked(range(step, step + 1), capacity=1))

    def stacked(self, steps: range, *, capacity: int) -> DeviceBatches:
        """The batches of some steps, for a step to gather, with room for `capacity`."""
        size = self.host.batch_size
        padded, real = self.host.padded(steps, np.arange(size))
        sharding = batch_sharding(self._mesh, stacked=True)

        def put(array: np.ndarray, dtype: type) -> Array:
            filled = np.zeros((capacity, size), dtype)
            filled[: len(array)] = array
            return from_host(filled.shape, sharding, filled.__getitem__)

        weight = put(real, np.float32) if self.host.pads else None
        replicated, taken = NamedSharding(self._mesh, PartitionSpec()), np.int32(len(steps))
        count = from_host((), replicated, lambda _: np.asarray(taken))
        return DeviceBatches(self._examples, put(padded, np.int32), weight, count)
