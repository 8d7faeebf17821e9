"""The memory of one device: exact for what a step keeps, and from XLA for the rest."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..compiled._causes import Leaf
from ..sharding._leaves import array_leaves
from ..sharding._mesh import batch_sharding
from ..training._layout import is_offloaded, make_layout
from ..training._state import TrainState, split_model
from ._plan import PlannedMemory
from ._request import Request


def plan_memory(
    request: Request, state: TrainState, gradients: Sequence[Leaf], analysis: Any
) -> PlannedMemory:
    """What one device needs.

    **Arguments:**

    - `request`, `state`: what was compiled.
    - `gradients`: from `stored_gradients`.
    - `analysis`: of the compiled step, by XLA.
    """
    params, optimizer = _bytes(state.model), _bytes(state.opt_state)
    offloaded, total = _offloaded_bytes(state), request.target.memory
    # The compiler for CPUs does not distinguish memories.
    not_here = offloaded - analysis.host_argument_size_in_bytes
    return PlannedMemory(
        parameters=params,
        optimizer=optimizer - offloaded,
        other_state=_bytes(state) - params - optimizer,
        batch=_batch_bytes(request, state),
        gradients=sum(leaf.bytes for leaf in gradients),
        temporaries=analysis.temp_size_in_bytes,
        peak=analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
        - not_here,
        device=None if total is None else int(total),
        host=offloaded
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
        + analysis.host_temp_size_in_bytes,
    )


def least_bytes(request: Request, state: TrainState) -> int:
    """The bytes of a device that the state, the batch and the gradients need."""
    total = _bytes(state) - _offloaded_bytes(state) + _batch_bytes(request, state)
    if request.options["nonfinite"] == "ignore":
        return total  # Each gradient may be gone before the next is made.
    # All gradients at once, in the dtype of computation if that is the smaller one.
    compute = None if request.precision is None else request.precision.compute
    widest = math.inf if compute is None else jnp.dtype(compute).itemsize
    gradients = stored_gradients(state)
    return total + int(sum(min(x.bytes, widest * math.prod(x.shape)) for x in gradients))


def stored_gradients(state: TrainState) -> list[Leaf]:
    """The trained arrays of a state's model, as their gradients are stored."""
    made = state.made_with
    assert made is not None  # By `abstract_state`.
    params = split_model(state.model, made.trainable(state.model))[0]
    layout = make_layout(state.model, params, state.opt_state, mesh_of(state), made.rule)
    return [
        Leaf(path, sharding.shard_shape(leaf.shape), shard_bytes(leaf, sharding))
        for (path, leaf), sharding in zip(
            array_leaves(params), jax.tree.leaves(layout.update), strict=True
        )
    ]


def mesh_of(state: TrainState) -> Mesh:
    """The mesh of a state."""
    return state.step.sharding.mesh


def shard_bytes(leaf: Any, sharding: Any = None) -> int:
    """The bytes of one device's part of an array."""
    shape = (sharding or leaf.sharding).shard_shape(leaf.shape)
    return leaf.dtype.itemsize * math.prod(shape)


def _bytes(tree: PyTree) -> int:
    return sum(shard_bytes(leaf) for _, leaf in array_leaves(tree))


def _offloaded_bytes(state: TrainState) -> int:
    """What is in the host's memory instead."""
    assert state.made_with is not None
    rule, leaves = state.made_with.rule, jax.tree.leaves(state.opt_state)
    return sum(shard_bytes(leaf) for leaf in leaves if is_offloaded(leaf, rule))


def _batch_bytes(request: Request, state: TrainState) -> int:
    rows = batch_sharding(mesh_of(state))
    return sum(shard_bytes(x, rows) for x in jax.tree.leaves(request.batch))
