"""Where the arrays of a training state are stored, and axes that split none of them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..compiled._lowered import unsplit_axes
from ..sharding._combinators import HOST_MEMORY, offloads, optimizer_rule
from ..sharding._leaf_rules import replicate
from ..sharding._leaves import is_array, is_key
from ..sharding._mesh import batch_axes, used_axes
from ..sharding._optimizer_state import decide_opt_state
from ..sharding._placement import (
    as_shardings,
    broadcast_prefix,
    decide_leaves,
    filter_shard,
    named_leaves,
)
from ..sharding._rule import Rule, rule_name
from ..sharding._spec import spec_axes
from ..sharding._text import comma_list, format_mesh
from ._state import TrainState, replace


class StateLayout(NamedTuple):
    """Where the arrays of a state are stored between steps.

    - `model`: the sharding of each array of the model, `None` for its other leaves.
    - `update`: for each trained array the sharding of its gradient and its update, which
        under `zero1` is not that of the parameter.
    - `opt_state`: the sharding of each array of the optimizer's state.
    - `replicated`: the sharding of everything else.
    - `rule`: what decided.
    """

    model: PyTree[NamedSharding | None]
    update: PyTree[NamedSharding | None]
    opt_state: PyTree[NamedSharding | None]
    replicated: NamedSharding
    rule: Rule

    @property
    def mesh(self) -> Mesh:
        """The mesh that a state is on."""
        return self.replicated.mesh  # pyright: ignore[reportReturnType]

    def of(self, state: TrainState) -> TrainState:
        """The shardings of a state: a prefix of it."""
        rest = self.replicated
        fields = (rest, self.model, self.opt_state, rest, rest, rest)
        return TrainState.tree_unflatten(state.made_with, fields)

    def flat(self, state: TrainState) -> list[NamedSharding]:
        """The sharding of each array of a state, in the order of `flatten_state`."""
        return broadcast_prefix(self.of(state), state)  # pyright: ignore


def make_layout(
    model: PyTree,
    params: PyTree,
    opt_state: PyTree,
    mesh: Mesh,
    rule: Rule,
) -> StateLayout:
    """Ask the rule about every array of a state.

    **Arguments:**

    - `model`, `opt_state`: of the state, or `jax.ShapeDtypeStruct`s for their arrays.
    - `params`: the trained part of the model, `None` in the place of everything else.
    - `mesh`, `rule`: as for [`eqxshard.init_state`][].
    """
    stored = decide_leaves(named_leaves(model), mesh, rule)
    updates = optimizer_rule(rule)
    if updates is rule:
        known = dict(zip(_array_paths(model), stored, strict=True))
        decisions = [known[path] for path in _array_paths(params)]
    else:
        decisions = decide_leaves(named_leaves(params), mesh, updates)
    state_leaves = decide_opt_state(opt_state, params, decisions, mesh, updates)

    def in_memory(leaf: Any, sharding: NamedSharding | None) -> NamedSharding | None:
        if sharding is None or not is_offloaded(leaf, rule):
            return sharding
        return sharding.with_memory_kind(HOST_MEMORY)

    on_device = as_shardings(opt_state, mesh, (each.decision for each in state_leaves))
    return StateLayout(
        model=as_shardings(model, mesh, stored),
        update=as_shardings(params, mesh, decisions),
        opt_state=jax.tree.map(in_memory, opt_state, on_device),
        replicated=NamedSharding(mesh, PartitionSpec()),
        rule=rule,
    )


def _array_paths(tree: PyTree) -> list[Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [path for path, leaf in leaves if is_array(leaf)]


def is_offloaded(leaf: Any, rule: Rule) -> bool:
    """Whether a leaf of the optimizer's state is kept in host memory between steps.

    Its sharding says so too, but not on devices that are only there to compile for.
    """
    return offloads(rule) and is_array(leaf) and leaf.shape != () and not is_key(leaf)


def fetch_offloaded(opt_state: PyTree, layout: StateLayout) -> PyTree:
    """Inside jit: an optimizer's state, also what is in host memory between steps."""
    return _move(opt_state, layout, jax.memory.Space.Device)


def constrain_state(state: TrainState, layout: StateLayout) -> TrainState:
    """Inside jit: leave each array of a state where it is stored between steps."""
    # First on the devices: the compiler does not split in host memory.
    on_device = jax.tree.map(lambda x: NamedSharding(x.mesh, x.spec), layout.of(state))
    state = filter_shard(state, on_device)
    opt_state = _move(state.opt_state, layout, jax.memory.Space.Host)
    return replace(state, opt_state=opt_state)


def _move(opt_state: PyTree, layout: StateLayout, to: Any) -> PyTree:
    def move(leaf: Any) -> Any:
        return jax.device_put(leaf, to) if is_offloaded(leaf, layout.rule) else leaf

    return jax.tree.map(move, opt_state)


def unused_axes(
    state: TrainState, mesh: Mesh, rule: Rule, lower: Callable[[], jax.stages.Lowered]
) -> Iterator[str]:
    """What to warn of: a rule, or axes, that split nothing.

    **Arguments:**

    - `state`, `mesh`, `rule`: those of the step.
    - `lower`: lowers the step; called if an axis splits no array of the state, which the
        loss may still use.
    """
    idle = _idle_axes(state, mesh)
    splits_none = len(idle) == sum(n > 1 for n in mesh.shape.values())
    if "fsdp" in idle or (idle and splits_none and rule != replicate()):
        yield (
            f"{rule_name(rule)} splits no array over {comma_list(idle)} of the mesh "
            f"{format_mesh(used_axes(mesh.shape))}, so each device holds all of them; use "
            "a mesh with an axis that the rule splits over, or another rule, such as "
            "eqxshard.fsdp() with a smaller min_size."
        )
    for axis in repeated_axes(state, mesh, lower):
        yield (
            f"{describe_repeated(axis, idle[axis])}; use them for data, or use a rule that "
            f"splits arrays over {axis}."
        )


def repeated_axes(
    state: TrainState, mesh: Mesh, lower: Callable[[], jax.stages.Lowered]
) -> list[str]:
    """The axes over which nothing is split, so that their devices repeat the same work.

    **Arguments:** as for `unused_axes`.
    """
    idle = [axis for axis in _idle_axes(state, mesh) if axis not in batch_axes(mesh)]
    return unsplit_axes(idle, lower)


def describe_repeated(axis: str, size: int) -> str:
    """What is wrong with an axis of `repeated_axes`."""
    return f"nothing is split over {axis}={size}, so its devices repeat the same work"


def _idle_axes(state: TrainState, mesh: Mesh) -> dict[str, int]:
    """The axes that split no array of the model and the optimizer's state."""
    arrays = filter(is_array, jax.tree.leaves((state.model, state.opt_state)))
    split = {axis for array in arrays for axis in spec_axes(array.sharding.spec)}
    return {axis: n for axis, n in mesh.shape.items() if n > 1 and axis not in split}
