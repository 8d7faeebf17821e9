"""The shardings of a training state, computed once from the rule."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..sharding._combinators import HOST_MEMORY, offloads, optimizer_rule
from ..sharding._leaves import is_array
from ..sharding._placement import assign_shardings, filter_shard
from ..sharding._rule import Rule
from ._signature import mesh_of
from ._state import TrainState, split_model


class StateLayout(NamedTuple):
    """Where the arrays of a state are stored between steps.

    - `model`: the sharding of each array of the model, `None` for its other leaves.
    - `update`: for each trained array the sharding of its gradient and its update, which
        under `zero1` is not that of the parameter.
    - `opt_state`: the sharding of each array of the optimizer's state.
    - `on_host`: whether each array of the optimizer's state is kept in host memory. (Its
        sharding says so too, but not on devices that are only there to compile for.)
    - `replicated`: the sharding of everything else.
    """

    model: PyTree[NamedSharding | None]
    update: PyTree[NamedSharding | None]
    opt_state: PyTree[NamedSharding | None]
    on_host: PyTree[bool]
    replicated: NamedSharding

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
    follow = _Followers(params, update, replicated, offloads(rule))
    state = jax.tree_util.tree_map_with_path(follow.sharding, opt_state)
    on_host = jax.tree_util.tree_map_with_path(follow.is_on_host, opt_state)
    return StateLayout(storage, update, state, on_host, replicated)


class _Followers:
    """Where the arrays of an optimizer's state are: with their parameters' updates.

    Such as `0.mu.layers.0.weight`: its path ends like that of its parameter, and it has
    its shape. Factored states, such as Adafactor's, are shaped unlike their parameters.

    **Arguments:**

    - `params`, `update`: the trained arrays, and the shardings of their updates.
    - `replicated`: the sharding of arrays that follow none.
    - `offloaded`: whether they are kept in host memory.
    """

    def __init__(
        self,
        params: PyTree,
        update: PyTree[NamedSharding | None],
        replicated: NamedSharding,
        offloaded: bool,
    ):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        pairs = zip(leaves, jax.tree.leaves(update), strict=True)
        self._params = {path: (x.shape, sharding) for (path, x), sharding in pairs}
        self._replicated = replicated
        self._offloaded = offloaded

    def _param(self, path: tuple[Any, ...]) -> tuple[Any, NamedSharding] | None:
        ends = (path[start:] for start in range(len(path) + 1))
        return next((self._params[end] for end in ends if end in self._params), None)

    def is_on_host(self, path: tuple[Any, ...], leaf: Any) -> bool:
        """Whether a leaf is kept in host memory, as all that follow a parameter are."""
        is_large = is_array(leaf) and leaf.shape != ()
        return self._offloaded and is_large and self._param(path) is not None

    def sharding(self, path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        """The sharding of a leaf, `None` if it is not an array."""
        if not is_array(leaf):
            return None
        shape, sharding = self._param(path) or (None, self._replicated)
        sharding = sharding if leaf.shape == shape else self._replicated
        on_host = self.is_on_host(path, leaf)
        return sharding.with_memory_kind(HOST_MEMORY) if on_host else sharding


def fetch_offloaded(opt_state: PyTree, on_host: PyTree[bool]) -> PyTree:
    """Inside jit: fetch the arrays that are kept in host memory between steps."""
    return _move(opt_state, on_host, jax.memory.Space.Device)


def constrain_state(state: TrainState, layout: StateLayout) -> TrainState:
    """Inside jit: leave each array of a state where it is stored between steps."""
    rest = state.step, state.key, state.model_state, state.loss_scale
    step, key, model_state, loss_scale = filter_shard(rest, layout.replicated)
    # Left to itself, the compiler may gather in host memory.
    on_device = jax.tree.map(lambda x: NamedSharding(x.mesh, x.spec), layout.opt_state)
    opt_state = filter_shard(state.opt_state, on_device)
    return TrainState(
        step=step,
        model=filter_shard(state.model, layout.model),
        opt_state=_move(opt_state, layout.on_host, jax.memory.Space.Host),
        key=key,
        model_state=model_state,
        loss_scale=loss_scale,
        made_with=state.made_with,
    )


def offloaded_arrays(state: TrainState) -> list[Any]:
    """The arrays of a state from `init_state` that are kept in host memory."""
    made = state.made_with
    if made is None or not offloads(made.rule):
        return []
    mesh = mesh_of([state.step], "TrainState")
    params, _ = split_model(state.model, made.trainable(state.model))
    layout = make_layout(state.model, params, state.opt_state, mesh, made.rule)
    pairs = zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(layout.on_host))
    return [leaf for leaf, on_host in pairs if on_host]


def _move(arrays: PyTree, on_host: PyTree[bool], to: Any) -> PyTree:
    return jax.tree.map(
        lambda there, x: jax.device_put(x, to) if there else x, on_host, arrays
    )
