"""The inputs of a compiled step: one batch, stacked batches, or rows of a resident dataset.

Each kind is a class with the same methods, so that steps treat them alike.
"""

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from ..data._resident import DeviceBatches
from ..sharding._leaves import is_array, leaf_path
from ..sharding._mesh import (
    batch_sharding,
    check_batch_size,
    describe_mesh,
    format_sharding,
)
from ._metrics import Metrics

_Carry = TypeVar("_Carry")
_Step = Callable[[_Carry, PyTree], tuple[_Carry, PyTree]]


class StepInput(abc.ABC):
    """A kind of input of a step.

    - `suffix`: of the name of a step that takes it, in profiles and compiled modules.
    """

    suffix: str

    @abc.abstractmethod
    def check_shapes(self, batch: PyTree, mesh: Mesh, accumulate: int) -> None:
        """Raise `ValueError` unless all entries have the same rows, and these divide."""

    @abc.abstractmethod
    def check_placement(self, batch: PyTree, mesh: Mesh) -> None:
        """Raise `ValueError` if a batch is committed elsewhere than the step takes it."""

    def check_ready(
        self, batch: PyTree, mesh: Mesh, wanted: NamedSharding | None, accumulate: int = 1
    ) -> None:
        """Raise `ValueError` if a batch was donated, or is committed elsewhere.

        JAX 0.10 ends the process on either. `wanted` is the sharding of this kind on the
        mesh, which the usual batch has.
        """
        elsewhere = False
        for leaf in jax.tree.leaves(batch):
            if not isinstance(leaf, jax.Array):
                continue
            if leaf.is_deleted():
                raise ValueError(
                    "an array of the batch was deleted, or donated to an earlier call; "
                    "make the batch anew, or copy the array before it is donated."
                )
            elsewhere = elsewhere or leaf.sharding != wanted
        if elsewhere:
            self.check_shapes(batch, mesh, accumulate)
            self.check_placement(batch, mesh)

    @abc.abstractmethod
    def program(self, step: str, batch: PyTree) -> str:
        """What users call the program for a batch, whose first compile is expected.

        It has the sizes that are its own by design: the length of a loop, of a dataset.
        """

    @abc.abstractmethod
    def sharding(self, mesh: Mesh) -> NamedSharding | None:
        """The sharding that the step takes a batch in; `None` for any."""

    @abc.abstractmethod
    def run(
        self, step: _Step[_Carry], carry: _Carry, batch: PyTree, mesh: Mesh
    ) -> tuple[_Carry, Any]:
        """Call a step for each batch; stack the results if there may be several."""

    @abc.abstractmethod
    def count(self, batch: PyTree, metrics: Metrics) -> int:
        """The number of steps that were taken."""


class _Batch(StepInput):
    """One batch, or stacked ones: a PyTree of arrays, with rows behind `leading` dims."""

    def __init__(self, stacked: bool):
        self.suffix = "s" if stacked else ""
        self._stacked = stacked

    def check_shapes(self, batch: PyTree, mesh: Mesh, accumulate: int = 1) -> None:
        if isinstance(batch, DeviceBatches):
            raise TypeError(
                "Loader.stacked returns batches for several steps; give them to many, or "
                "iterate over the loader."
            )
        leading = 2 if self._stacked else 1
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        shapes = {leaf_path(path): getattr(leaf, "shape", ()) for path, leaf in leaves}
        sizes = {shape[:leading] for shape in shapes.values()}
        if len(sizes) != 1 or len(next(iter(sizes))) < leading:
            dims = "dims of steps and examples" if self._stacked else "dim of examples"
            raise ValueError(
                f"the entries of a batch have the shapes {shapes}; give each the same "
                f"leading {dims}."
            )
        rows = next(iter(sizes))[leading - 1]
        check_batch_size(rows, mesh, accumulate=accumulate)

    def check_placement(self, batch: PyTree, mesh: Mesh) -> None:
        wanted = self.sharding(mesh)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            _check_array(path, leaf)
            if is_elsewhere(leaf, wanted):
                raise ValueError(
                    f"batch entry {leaf_path(path)} is sharded as "
                    f"{format_sharding(leaf.sharding)}, and the step takes it as "
                    f"{format_sharding(wanted)}; make the loader with the step's mesh, or "
                    "place it with filter_shard(batch, batch_sharding(mesh))."
                )

    def program(self, step: str, batch: PyTree) -> str:
        if not self._stacked:
            return step
        return f"{step}.many (length {jax.tree.leaves(batch)[0].shape[0]})"

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return batch_sharding(mesh, stacked=self._stacked)

    def run(
        self, step: _Step[_Carry], carry: _Carry, batch: PyTree, mesh: Mesh
    ) -> tuple[_Carry, Any]:
        return jax.lax.scan(step, carry, batch) if self._stacked else step(carry, batch)

    def count(self, batch: PyTree, metrics: Metrics) -> int:
        return metrics.weight.size


class _Resident(StepInput):
    """Rows of a dataset on the devices, from which the step gathers batches."""

    suffix = "s"

    def check_shapes(self, batch: DeviceBatches, mesh: Mesh, accumulate: int = 1) -> None:
        check_batch_size(batch.rows.shape[1], mesh, accumulate=accumulate)

    def check_placement(self, batch: DeviceBatches, mesh: Mesh) -> None:
        sharding = batch.rows.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise ValueError(
                f"the loader's dataset is on {format_sharding(sharding)}, and the step on "
                f"{describe_mesh(mesh)}; make the loader and the step with the same mesh."
            )

    def program(self, step: str, batch: DeviceBatches) -> str:
        examples = jax.tree.leaves(batch.examples)[0].shape[0]
        return f"{step}.many (length up to {len(batch.rows)}, {examples} examples)"

    def sharding(self, mesh: Mesh) -> None:
        return None

    def run(
        self, step: _Step[_Carry], carry: _Carry, batch: DeviceBatches, mesh: Mesh
    ) -> tuple[_Carry, Any]:
        room = batch.rows.shape[0]
        out = jax.eval_shape(lambda c: step(c, batch.batch(jnp.int32(0), mesh))[1], carry)
        # A loop over the steps to take, so that any number of them up to the room that
        # there is shares one compiled program.
        zeros = jax.tree.map(lambda leaf: jnp.zeros((room, *leaf.shape), leaf.dtype), out)

        def body(loop: tuple[Array, _Carry, PyTree]) -> tuple[Array, _Carry, PyTree]:
            index, carry, outs = loop
            carry, out = step(carry, batch.batch(index, mesh))
            outs = jax.tree.map(lambda all, one: all.at[index].set(one), outs, out)
            return index + 1, carry, outs

        start = jnp.int32(0), carry, zeros
        _, carry, outs = jax.lax.while_loop(lambda loop: loop[0] < batch.count, body, start)
        return carry, outs

    def count(self, batch: DeviceBatches, metrics: Metrics) -> int:
        return int(batch.count)


ONE_BATCH = _Batch(stacked=False)
STACKED_BATCHES = _Batch(stacked=True)
RESIDENT_BATCHES = _Resident()


def several_batches(batches: PyTree) -> StepInput:
    """The kind of several batches."""
    return RESIDENT_BATCHES if isinstance(batches, DeviceBatches) else STACKED_BATCHES


def _check_array(path: tuple[Any, ...], leaf: Any) -> None:
    if not (is_array(leaf) or isinstance(leaf, np.ndarray | np.generic)):
        raise TypeError(
            f"batch entry {leaf_path(path)} is a {type(leaf).__module__}."
            f"{type(leaf).__name__}; convert it with numpy.asarray."
        )


def is_elsewhere(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether an array is committed to another sharding."""
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
