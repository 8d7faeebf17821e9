"""What a step is given, looked at before it is blamed for what comes of it."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import PyTree

from ._batches import DeviceBatches, Kind
from ._update import Update
from .mesh import batch_sharding, check_batch_size, describe
from .sharding import is_array, leaf_path
from .state import TrainState

DONATED = (
    "this state was donated to an earlier step, and its model with it; go on with the "
    "state that the step returned."
)


def check_state(state: TrainState, params: PyTree, update: Update) -> None:
    """Refuse a state of another optimizer or filter spec, or with another loss scale."""
    fresh = eqx.filter_eval_shape(update.optim.init, params)
    if jax.tree.structure(fresh) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "the optimizer's state in this TrainState is not that of this optimizer and "
            "model; use the optimizer, and trainable=, that the state was made with."
        )
    scales = update.precision is not None and update.precision.scales_loss
    if scales != (state.loss_scale is not None):
        raise ValueError(
            "this TrainState and this step do not agree on a scale of the loss; make both "
            "with the same precision=."
        )


def check_places(state: TrainState, places: Sequence[NamedSharding]) -> None:
    """Refuse a state of another mesh or rule; what is on no device yet may go anywhere."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(state, is_array))
    for (path, leaf), there in zip(leaves, places, strict=True):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(DONATED)
        if _lies_elsewhere(leaf, there):
            raise ValueError(
                f"{leaf_path(path)} lies as {_in_words(leaf.sharding)}, and the step has "
                f"it as {_in_words(there)}; make the state and the step with the same mesh "
                "and rule, or move the state with filter_shard."
            )


def check_batch_places(batch: PyTree, mesh: Mesh, kind: Kind) -> None:
    """Refuse a batch that lies elsewhere than the step takes it from."""
    if isinstance(batch, DeviceBatches):
        sharding = batch.rows.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise ValueError(
                f"the loader's dataset lies as {_in_words(sharding)}, and the step is on "
                f"{describe(mesh)}; make the loader and the step with the same mesh."
            )
        return
    there = batch_sharding(mesh, stacked=kind == "stacked")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if _lies_elsewhere(leaf, there):
            raise ValueError(
                f"batch entry {leaf_path(path)} lies as {_in_words(leaf.sharding)}; place "
                "it with filter_shard(batch, batch_sharding(mesh))."
            )


def _lies_elsewhere(leaf: Any, there: NamedSharding) -> bool:
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(there, leaf.ndim)


def _in_words(sharding: Sharding) -> str:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return str(sharding)
    return f"{sharding.spec} on {describe(sharding.mesh)}"


def check_batch(batch: PyTree, mesh: Mesh, kind: Kind, accumulate: int = 1) -> None:
    """Refuse a batch, or several, whose rows do not belong together or do not divide."""
    if isinstance(batch, DeviceBatches):
        if kind == "one":
            raise TypeError(
                "these are batches for several steps; give them to many, or iterate the "
                "loader."
            )
        check_batch_size(batch.rows.shape[1], mesh, accumulate=accumulate)
        return
    leading = 2 if kind == "stacked" else 1
    leaves = jax.tree.leaves(batch)
    shapes: list[tuple[int, ...]] = [getattr(leaf, "shape", ()) for leaf in leaves]
    sizes = {shape[:leading] for shape in shapes}
    if len(sizes) != 1 or len(shapes[0]) < leading:
        paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
        axes = "axes of steps and examples" if leading == 2 else "axis of examples"
        raise ValueError(
            f"the entries of a batch have the shapes {dict(zip(paths, shapes))}; give each "
            f"the same leading {axes}."
        )
    check_batch_size(shapes[0][leading - 1], mesh, accumulate=accumulate)
