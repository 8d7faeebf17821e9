"""The shardings of a training state, computed once from the rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..sharding._combinators import HOST_MEMORY, offloads, optimizer_rule
from ..sharding._leaves import is_array
from ..sharding._placement import assign_shardings, filter_shard
from ..sharding._rule import Rule


class StateLayout(NamedTuple):
    """Where the arrays of a state are stored between steps.

    - `model`: the sharding of each array of the model, `None` for its other leaves.
    - `update`: for each trained array the sharding of its gradient and its update, which
        under `zero1` is not that of the parameter.
    - `opt_state`: the sharding of each array of the optimizer's state.
    - `whole`: the sharding of everything else.
    """

    model: PyTree[NamedSharding | None]
    update: PyTree[NamedSharding | None]
    opt_state: PyTree[NamedSharding | None]
    whole: NamedSharding

    def flat(self, state: Any) -> list[NamedSharding]:
        """The sharding of each array of a state, in the order of `flatten_state`."""
        rest = (state.key, state.model_state, state.loss_scale)
        return [
            self.whole,
            *jax.tree.leaves(self.model),
            *jax.tree.leaves(self.opt_state),
            *[self.whole for leaf in jax.tree.leaves(rest) if is_array(leaf)],
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
    state = opt_state_shardings(opt_state, params, update, mesh, offloads(rule))
    return StateLayout(storage, update, state, NamedSharding(mesh, PartitionSpec()))


def opt_state_shardings(
    opt_state: PyTree,
    params: PyTree,
    update: PyTree[NamedSharding | None],
    mesh: Mesh,
    offloaded: bool,
) -> PyTree[NamedSharding | None]:
    """The sharding of each array of an optimizer's state: its parameter's update's.

    Such as `0.mu.layers.0.weight`: its path ends like that of its parameter, and it has
    its shape. Factored states, such as Adafactor's, are shaped unlike their parameters.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    known = {
        path: (param.shape, sharding)
        for (path, param), sharding in zip(leaves, jax.tree.leaves(update), strict=True)
    }

    def follow(path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        if not is_array(leaf):
            return None
        ends = (path[start:] for start in range(len(path) + 1))
        shape, sharding = next((known[end] for end in ends if end in known), (None, whole))
        sharding = sharding if leaf.shape == shape else whole
        move = offloaded and shape is not None and leaf.shape
        return _in_memory(sharding, HOST_MEMORY) if move else sharding

    return jax.tree_util.tree_map_with_path(follow, opt_state)


def fetch_offloaded(
    arrays: Sequence[Array], shardings: Sequence[NamedSharding]
) -> list[Array]:
    """Fetch the arrays that are kept in host memory between steps."""
    return [
        jax.device_put(array, _in_memory(sharding, "device"))
        if sharding.memory_kind == HOST_MEMORY
        else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def offload_to_host(
    arrays: Sequence[Array], shardings: Sequence[NamedSharding]
) -> list[Array]:
    """Constrain arrays to their shardings; send those that belong there to host memory."""
    on_device = [NamedSharding(each.mesh, each.spec) for each in shardings]
    return [
        jax.device_put(array, sharding) if sharding.memory_kind == HOST_MEMORY else array
        for array, sharding in zip(
            filter_shard([*arrays], on_device), shardings, strict=True
        )
    ]


def _in_memory(sharding: NamedSharding, kind: str) -> NamedSharding:
    """The sharding in a memory, whether its devices list that or are not there."""
    found = sharding.with_memory_kind(kind)
    if found.memory_kind == kind:
        return found
    return _Unlisted.of(sharding, kind)


class _Unlisted(NamedSharding):
    """A sharding in a memory that its devices do not list, because they are not there.

    JAX forgets the memory of others.
    """

    _kind: str

    @staticmethod
    def of(sharding: NamedSharding, kind: str) -> "_Unlisted":
        made = _Unlisted(sharding.mesh, sharding.spec)
        made._kind = _Kind(kind)
        return made

    @property
    def memory_kind(self) -> str:
        return self._kind

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Unlisted) and self._kind == other._kind
        return same and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self._kind, super().__hash__()))


class _Kind(str):
    """A memory that a compiled step does not name, which JAX compares with it."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return other is not None and super().__ne__(other)
