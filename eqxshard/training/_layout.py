"""The shardings of a training state, computed once from the rule."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..sharding._combinators import HOST_MEMORY, offloads, optimizer_rule
from ..sharding._leaves import is_array, is_key
from ..sharding._placement import assign_shardings, filter_shard
from ..sharding._rule import Rule
from ._state import TrainState


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

    def flat(self, state: TrainState) -> list[NamedSharding]:
        """The sharding of each array of a state, in the order of `flatten_state`."""
        rest = (state.key, state.model_state, state.loss_scale)
        return [
            self.replicated,
            *jax.tree.leaves(self.model),
            *jax.tree.leaves(self.opt_state),
            *[self.replicated for leaf in jax.tree.leaves(rest) if is_array(leaf)],
        ]


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
    storage = assign_shardings(model, mesh, rule)
    update_rule = optimizer_rule(rule)
    if update_rule == rule:
        update = jax.tree.map(
            lambda param, sharding: None if param is None else sharding,
            params,
            storage,
            is_leaf=lambda leaf: leaf is None,
        )
    else:
        update = assign_shardings(params, mesh, update_rule)
    replicated = NamedSharding(mesh, PartitionSpec())
    state = _opt_state_shardings(opt_state, params, update, replicated, rule)
    return StateLayout(storage, update, state, replicated, rule)


def _opt_state_shardings(
    opt_state: PyTree,
    params: PyTree,
    update: PyTree[NamedSharding | None],
    replicated: NamedSharding,
    rule: Rule,
) -> PyTree[NamedSharding | None]:
    """The sharding of each array of an optimizer's state: its parameter's update's.

    Such as `0.mu.layers.0.weight`: its path ends like that of its parameter, and it has
    its shape. Factored states, such as Adafactor's, are shaped unlike their parameters.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    pairs = zip(leaves, jax.tree.leaves(update), strict=True)
    known = {path: (param.shape, sharding) for (path, param), sharding in pairs}

    def follow(path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        if not is_array(leaf):
            return None
        ends = (path[start:] for start in range(len(path) + 1))
        shape, sharding = next((known[x] for x in ends if x in known), (None, replicated))
        sharding = sharding if leaf.shape == shape else replicated
        on_host = is_offloaded(leaf, rule)
        return sharding.with_memory_kind(HOST_MEMORY) if on_host else sharding

    return jax.tree_util.tree_map_with_path(follow, opt_state)


def is_offloaded(leaf: Any, rule: Rule) -> bool:
    """Whether a leaf of the optimizer's state is kept in host memory between steps.

    Its sharding says so too, but not on devices that are only there to compile for.
    """
    return offloads(rule) and is_array(leaf) and leaf.shape != () and not is_key(leaf)


def fetch_offloaded(state: TrainState, rule: Rule) -> PyTree:
    """Inside jit: the optimizer's state, also what is in host memory between steps."""
    return _move(state.opt_state, rule, jax.memory.Space.Device)


def constrain_state(state: TrainState, layout: StateLayout) -> TrainState:
    """Inside jit: leave each array of a state where it is stored between steps."""
    rest = state.step, state.key, state.model_state, state.loss_scale
    step, key, model_state, loss_scale = filter_shard(rest, layout.replicated)
    # First on the devices: the compiler does not split in host memory.
    on_device = jax.tree.map(lambda x: NamedSharding(x.mesh, x.spec), layout.opt_state)
    opt_state = filter_shard(state.opt_state, on_device)
    return TrainState(
        step=step,
        model=filter_shard(state.model, layout.model),
        opt_state=_move(opt_state, layout.rule, jax.memory.Space.Host),
        key=key,
        model_state=model_state,
        loss_scale=loss_scale,
        made_with=state.made_with,
    )


def _move(opt_state: PyTree, rule: Rule, to: Any) -> PyTree:
    return jax.tree.map(
        lambda x: jax.device_put(x, to) if is_offloaded(x, rule) else x, opt_state
    )
