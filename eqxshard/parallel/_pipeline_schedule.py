"""When each stage of a pipeline works on which microbatch, with which of its layers.

The terms are those of `_pipeline.py`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Bool, Int, PyTree

from ..sharding._leaves import array_leaves, is_array, stacked_depth
from ..sharding._mesh import BATCH_AXES
from ..sharding._spec import format_sizes


class Schedule(NamedTuple):
    """The turns of a stage: each is one chunk for one microbatch, and takes a tick.

    All stages take the same turns, each stage one tick after the stage before it. A group
    of microbatches passes through the first chunk of every stage, then through the second,
    and so on, and then the next group starts. A group has as many microbatches as there
    are stages, so each comes back to the first stage just in time for its next chunk.
    """

    stages: int
    microbatches: int
    chunks: int

    @property
    def turns(self) -> int:
        """The number of turns of each stage."""
        return self.microbatches * self.chunks

    @property
    def ticks(self) -> int:
        """From the first turn of the first stage to the last turn of the last stage."""
        return self.turns + self.stages - 1

    @property
    def group(self) -> int:
        """The number of microbatches in a group."""
        return self.stages if self.chunks > 1 else self.microbatches

    @property
    def to_next(self) -> list[tuple[int, int]]:
        """From each stage to the next: a line, or with several chunks a ring."""
        line = [(i, i + 1) for i in range(self.stages - 1)]
        return line if self.chunks == 1 else [*line, (self.stages - 1, 0)]

    def turn(
        self, number: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Int[Array, ""], Bool[Array, ""]]:
        """The microbatch of a turn, its chunk, and whether there is such a turn."""
        passes, place = number // self.group, number % self.group
        microbatch = passes // self.chunks * self.group + place
        return microbatch, passes % self.chunks, (number >= 0) & (number < self.turns)

    def number(self, microbatch: Int[Array, ""], chunk: Int[Array, ""]) -> Int[Array, ""]:
        """The number of a turn: the inverse of `turn`."""
        passes = microbatch // self.group * self.chunks + chunk
        return passes * self.group + microbatch % self.group

    def inputs(self, x: Array) -> Array:
        """What enters the first stage in each tick: zeros, unless a new microbatch."""
        x = x.reshape(-1, 1, self.group, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, self.chunks - 1)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(self.turns, *x.shape[3:])
        return jnp.pad(x, [(0, self.stages - 1)] + [(0, 0)] * (x.ndim - 1))

    def outputs(self, h: Array) -> Array:
        """What leaves the last chunk, from the results of the last stage in all ticks."""
        h = h[self.stages - 1 :].reshape(-1, self.chunks, self.group, *h.shape[1:])
        return h[:, -1].reshape(self.microbatches, *h.shape[3:])


def split_chunks(
    layers: PyTree, chunks: int | None
) -> tuple[PyTree, Int[Array, "size chunks"]]:
    """Layers with a second dim of chunks, which may be one, and the number of each layer.

    The first dim is split over the stages, so that each has a part of every column: the
    layers are numbered column by column.
    """
    if chunks is None:
        depth, chunks = stacked_depth(layers), 1
        layers = jax.tree.map(lambda x: x[:, None] if is_array(x) else x, layers)
    else:
        depth = chunks * _column_size(layers, chunks)
    return layers, jnp.arange(depth).reshape(chunks, -1).T


def _column_size(layers: PyTree, chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"chunks={chunks} must be at least 1.")
    shapes = {path: leaf.shape for path, leaf in array_leaves(layers)}
    leading = {shape[:2] for shape in shapes.values()}
    if len(leading) != 1 or min(leading)[1:] != (chunks,):
        raise ValueError(
            f"the arrays of the layers have the shapes {shapes}, without common leading "
            f"dims (layers // chunks, {chunks}); stack the layers with "
            "eqx.filter_vmap(eqx.filter_vmap(make_layer))(keys), with keys of that shape."
        )
    return leading.pop()[0]


def make_schedule(
    layers: int, batch: int, microbatches: int, chunks: int
) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule, and the axes of the batch; raise unless everything divides."""
    if microbatches < 1:
        raise ValueError(f"microbatches={microbatches} must be at least 1.")
    mesh = jax.sharding.get_abstract_mesh()
    auto = [a for a, kind in zip(mesh.axis_names, mesh.axis_types) if kind is AxisType.Auto]
    stages = mesh.shape["stage"] if "stage" in auto else 1
    batch_axes = tuple(axis for axis in BATCH_AXES if axis in auto)
    schedule = Schedule(stages, microbatches, chunks)
    if stages == 1:
        return schedule, batch_axes
    if layers % (stages * chunks):
        parts = {"stage": stages} | ({"chunks": chunks} if chunks > 1 else {})
        raise ValueError(
            f"{layers} layers do not divide over {format_sizes(parts)}; use a multiple of "
            f"{stages * chunks} layers, or a number of stages that divides "
            f"{layers // chunks}."
        )
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} do not divide over stage={stages}, as they must "
            f"with chunks={chunks}; use a multiple of {stages} microbatches."
        )
    sizes = {axis: mesh.shape[axis] for axis in batch_axes}
    devices = math.prod(sizes.values())
    parts = devices * microbatches
    if batch % parts:
        raise ValueError(
            f"a batch of {batch} does not divide over {format_sizes(sizes)} = {devices} "
            f"devices, each with microbatches={microbatches}; use a multiple of {parts} "
            "examples, or fewer microbatches."
        )
    return schedule, batch_axes
