"""A dataset that is whole on every device, from which steps gather their batches."""

from collections.abc import Generator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from ..sharding._leaves import check_integers
from ..sharding._mesh import batch_sharding
from ..sharding._placement import from_host
from ..training._inputs import DeviceBatches
from ._batches import ExampleBatches


class ResidentDataset:
    """Puts all examples on every device once; then only row numbers are sent per batch.

    **Arguments:**

    - `examples`: reads the examples.
    - `count`: the number of examples.
    - `mesh`: the mesh of the devices.
    """

    def __init__(self, examples: ExampleBatches, count: int, mesh: Mesh):
        self._mesh = mesh
        arrays = examples.everything(count)
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

    def batches(
        self, examples: ExampleBatches, steps: range
    ) -> Generator[dict[str, Array], None, None]:
        """The batches of some steps, gathered one at a time."""
        for step in steps:
            yield self._gather(self.stacked(examples, range(step, step + 1), capacity=1))

    def stacked(
        self, examples: ExampleBatches, steps: range, *, capacity: int
    ) -> DeviceBatches:
        """The row numbers of some steps' batches, with room for `capacity` steps."""
        size = examples.steps.size
        padded, real = examples.padded(steps, np.arange(size))
        sharding = batch_sharding(self._mesh, stacked=True)

        def put(array: np.ndarray, dtype: type) -> Array:
            filled = np.zeros((capacity, size), dtype)
            filled[: len(array)] = array
            return from_host(filled.shape, sharding, filled.__getitem__)

        weight = put(real, np.float32) if examples.pads else None
        replicated, taken = NamedSharding(self._mesh, PartitionSpec()), np.int32(len(steps))
        count = from_host((), replicated, lambda _: np.asarray(taken))
        return DeviceBatches(self._examples, put(padded, np.int32), weight, count)
