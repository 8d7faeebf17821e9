"""The arrays of a model, and what each takes of a device with all that belongs to it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PyTree

from ..compiled._causes import Leaf
from ..sharding._leaves import array_leaves, is_array, leaf_path
from ..sharding._spec import axes_of
from ..training._layout import is_offloaded, make_layout
from ..training._state import TrainState, split_model


@dataclass(frozen=True)
class PlannedLeaf:
    """An array of a planned model, and what it takes of each device, in bytes.

    - `path`: such as `blocks.mlp.up`.
    - `shape`, `dtype`: of the whole array.
    - `spec`: the mesh axes that split each dim, such as `None, data+fsdp`; or `whole`.
    - `bytes`: of the array.
    - `gradient`: of its gradient as it is stored; 0 if it is not trained.
    - `optimizer`: of the arrays of the optimizer's state that are for it alone, but for
        those in the host's memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """The bytes of all three."""
        return self.bytes + self.gradient + self.optimizer


def plan_leaves(state: TrainState, gradients: Sequence[Leaf]) -> tuple[PlannedLeaf, ...]:
    """The arrays of a state's model, which may be `jax.ShapeDtypeStruct`s.

    **Arguments:**

    - `state`: the state.
    - `gradients`: from `stored_gradients`.
    """
    gradient = {each.path: each.bytes for each in gradients}
    optimizer = _optimizer_bytes(state.opt_state, _trained(state), on_host(state))
    sizes = mesh_of(state).shape
    return tuple(
        PlannedLeaf(
            path=path,
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            spec=_format_spec(leaf.sharding.spec, sizes),
            bytes=shard_bytes(leaf),
            gradient=gradient.get(path, 0),
            optimizer=optimizer.get(path, 0),
        )
        for path, leaf in array_leaves(state.model)
    )


def stored_gradients(state: TrainState) -> list[Leaf]:
    """The trained arrays of a state's model, as their gradients are stored."""
    made, params = state.made_with, _trained(state)
    assert made is not None  # By `abstract_state`.
    layout = make_layout(state.model, params, state.opt_state, mesh_of(state), made.rule)
    shardings = jax.tree.leaves(layout.update)
    return [
        Leaf(path, sharding.shard_shape(leaf.shape), shard_bytes(leaf, sharding))
        for (path, leaf), sharding in zip(array_leaves(params), shardings, strict=True)
    ]


def _trained(state: TrainState) -> PyTree:
    assert state.made_with is not None
    return split_model(state.model, state.made_with.trainable(state.model))[0]


def mesh_of(state: TrainState) -> Mesh:
    """The mesh of a state."""
    return state.step.sharding.mesh


def shard_bytes(leaf: Any, sharding: Any = None) -> int:
    """The bytes of one device's part of an array."""
    shape = (sharding or leaf.sharding).shard_shape(leaf.shape)
    return leaf.dtype.itemsize * math.prod(shape)


def on_host(state: TrainState) -> set[int]:
    """The `id`s of the arrays that are kept in the host's memory."""
    assert state.made_with is not None
    rule, leaves = state.made_with.rule, jax.tree.leaves(state.opt_state)
    return {id(leaf) for leaf in leaves if is_offloaded(leaf, rule)}


def _optimizer_bytes(
    opt_state: PyTree, params: PyTree, elsewhere: set[int]
) -> Mapping[str, int]:
    """By the path of a parameter, the bytes of the state whose paths end like it."""
    known = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
    total = Counter[str]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        ends = (path[start:] for start in range(len(path)))
        owner = next((end for end in ends if end in known), None)
        if owner is not None and is_array(leaf) and id(leaf) not in elsewhere:
            total[leaf_path(owner)] += shard_bytes(leaf)
    return total


def _format_spec(spec: PartitionSpec, sizes: Mapping[str, int]) -> str:
    """A spec without axes of one device, which split nothing."""
    dims = [[axis for axis in axes_of(entry) if sizes[axis] > 1] for entry in spec]
    return ", ".join("+".join(dim) or "None" for dim in dims) if any(dims) else "whole"
