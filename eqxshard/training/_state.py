"""`TrainState`, all that a step changes; and where its arrays are stored."""

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree, UInt32

from .._errors import UsageError, UsageTypeError
from ..compiled._lowered import unsplit_axes
from ..sharding._combinators import HOST_MEMORY, offloads, optimizer_rule
from ..sharding._leaf_rules import replicate
from ..sharding._leaves import array_leaves, is_array, is_inexact, is_key, leaf_path
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
from ..sharding._spec import AnyMesh, spec_axes
from ..sharding._text import comma_list, format_mesh
from ..transforms._partition import Static, partition
from ._donation import check_state_not_donated
from ._precision import LossScale, Precision

_FIELDS = ("step", "model", "opt_state", "key", "model_state", "loss_scale")
_KEYS = tuple(jax.tree_util.GetAttrKey(name) for name in _FIELDS)
#: The fields with their names, for the paths in errors, and what the state was made with.
_Fields = collections.namedtuple("_Fields", (*_FIELDS, "made_with"))


@dataclass(frozen=True)
class MadeWith:
    """The arguments of [`eqxshard.init_state`][] that the steps need too.

    - `rule`, `precision`: as they were given.
    - `trained`: whether each leaf of the model is trained; `True` for all that can be.
    """

    # States of different rules differ in structure, so that what JAX has traced for one is
    # not taken for the other. A rule may be one that cannot be hashed.
    rule: Rule = dataclasses.field(hash=False)
    trained: tuple[bool, ...] | Literal[True]
    precision: Precision | None

    def fits(self, model: PyTree) -> bool:
        """True if `trained` is that of a model of this structure."""
        return self.trained is True or len(self.trained) == len(jax.tree.leaves(model))

    def trainable(self, model: PyTree) -> PyTree[bool]:
        """The leaves of a model that are trained, as a filter spec."""
        if not self.fits(model):
            raise UsageError(
                "the model has other leaves than when its state was made; give "
                "make_train_step trainable=."
            )
        if self.trained is True:
            return True
        return jax.tree.unflatten(jax.tree.structure(model), self.trained)


@jax.tree_util.register_pytree_with_keys_class
class TrainState:
    """Everything that changes from step to step: an immutable PyTree.

    Change a copy of it with `equinox.tree_at`.

    - `step`: the number of steps taken.
    - `model`: the model, its parameters sharded as the rule says.
    - `opt_state`: the optimizer's state, each part sharded like its parameter.
    - `key`: the run's random key. It never changes: each step folds its number in, so a
        resumed run draws what the uninterrupted one would have drawn.
    - `model_state`: the `equinox.nn.State` of a model that has one, such as the running
        statistics of `BatchNorm`; otherwise `None`.
    - `loss_scale`: the factor on the loss under float16; otherwise `None`.
    - `made_with`: the rule, the trained leaves and the precision that the state was made
        with, which steps follow unless they are given others. (Not a leaf of the PyTree.)
    """

    # A step returns its arrays as the flat list that the next step takes. The modules
    # around them are built when they are first needed, which costs more than the
    # rest of the dispatch and which a training loop rarely does. `_flat` is
    # `(arrays, static)` of a state that a step returned; `_values` are the fields, once
    # they are built. At least one of the two is there. `_beside` are weak references to the
    # arrays that were beside the state when a step returned it: an array that is older than
    # a state has none of its memory.
    __slots__ = ("_beside", "_flat", "_values")
    _beside: list[Any]
    _flat: tuple[list[Any], Static] | None
    _values: "_Fields | None"
    # Under `jax.tree.map` and the like, the fields may hold anything.
    model: PyTree
    opt_state: PyTree
    key: Any
    model_state: Any
    loss_scale: Any
    made_with: MadeWith | None

    def __init__(
        self,
        step: Int[Array, ""],
        model: PyTree,
        opt_state: PyTree,
        key: Key[Array, ""] | UInt32[Array, "2"],
        model_state: eqx.nn.State | None = None,
        loss_scale: LossScale | None = None,
        made_with: MadeWith | None = None,
    ):
        self._flat = None
        self._values = _Fields(
            step, model, opt_state, key, model_state, loss_scale, made_with
        )

    @property
    def step(self) -> Any:
        """The number of steps taken."""
        # Always the first array: reading it builds nothing.
        return self._fields()[0] if self._flat is None else self._flat[0][0]

    def __getattr__(self, name: str) -> Any:
        if name not in _Fields._fields:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)
        return getattr(self._fields(), name)

    def _fields(self) -> "_Fields":
        values = self._values
        if values is None:
            assert self._flat is not None
            arrays, static = self._flat
            values = self._values = static.combine(arrays)
        return values

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[Any, Any], ...], MadeWith | None]:
        """The fields with their names, for `jax.tree`."""
        *fields, made_with = self._fields()
        return tuple(zip(_KEYS, fields)), made_with

    @classmethod
    def tree_unflatten(cls, made_with: MadeWith | None, fields: Any) -> "TrainState":
        """A state of any fields, for `jax.tree`."""
        state = object.__new__(cls)
        state._flat, state._values = None, _Fields(*fields, made_with)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainState, tuple(self._fields())

    def __repr__(self) -> str:
        fields = (
            f"  {name}={eqx.tree_pformat(value).replace(chr(10), chr(10) + '  ')},\n"
            for name, value in zip(_FIELDS, self._fields())
        )
        return f"TrainState(\n{''.join(fields)})"


def flatten_state(state: TrainState) -> tuple[list[Any], Static]:
    """A state's arrays and the rest of it; costs nothing if a step returned the state."""
    if not isinstance(state, TrainState):
        raise UsageTypeError(
            f"a {type(state).__name__} is not a TrainState; make one with init_state."
        )
    if state._flat is not None:
        return state._flat
    if not is_array(state.step) or not is_array(state.key):
        raise UsageTypeError(
            "the step or the key of this TrainState is not an array; write jnp.int32(0) "
            "and jax.random.key(0)."
        )
    arrays, static = partition(state._fields())
    return arrays, static.with_shapes(arrays)


def unflatten_state(
    arrays: list[Any], static: Static, beside: Sequence[Any] = ()
) -> TrainState:
    """The reverse of `flatten_state`; costs nothing until its modules are needed.

    `beside` are arrays that were there before those of the state.
    """
    state = object.__new__(TrainState)
    state._flat, state._values, state._beside = (arrays, static), None, []
    if beside:
        state._beside = [weakref.ref(x) for x in beside if isinstance(x, jax.Array)]
    return state


def replace(state: TrainState, **changes: Any) -> TrainState:
    """A state with other values in some of its fields."""
    return TrainState(*state._fields()._replace(**changes))


def refuse_state(model: Any, who: str, *, takes_pair: bool = False) -> None:
    """Refuse a state in the place of its model, or of the pair of a model and its state."""
    if isinstance(model, TrainState):
        pair = "state.model"
        if takes_pair and model.model_state is not None:
            pair = "the pair (state.model, state.model_state)"
        raise UsageTypeError(f"{who} takes a model; give it {pair}.")


def split_model(model: PyTree, trainable: PyTree) -> tuple[PyTree, PyTree]:
    """A model's trained arrays, and the rest of it."""
    try:
        chosen, rest = eqx.partition(model, trainable)
    except ValueError as error:
        raise UsageError(
            "trainable is not a prefix of the model; make it from the model, such as with "
            f"jax.tree.map(lambda _: False, model) and equinox.tree_at. ({error})"
        ) from None
    params, other = eqx.partition(chosen, is_inexact)
    return params, eqx.combine(other, rest)


def with_state(model: PyTree, model_state: eqx.nn.State | None) -> PyTree:
    """A model as user code gets it: paired with its state, if it has one."""
    if model_state is None:
        return model
    # A copy, because `State.set` invalidates its input, which others may use again.
    return model, jax.tree.map(lambda leaf: leaf, model_state)


def state_indices(model: PyTree) -> list[tuple[str, Any]]:
    """The indices by which a model looks values up in its state, with their paths."""
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=_is_index)
    return [(leaf_path(path), node) for path, node in found if _is_index(node)]


def _is_index(node: Any) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def without_state(made: PyTree) -> tuple[PyTree, eqx.nn.State | None]:
    """The reverse of `with_state`."""
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State):
        return made
    return made, None


# The states that one run trains: one, or a PyTree of several, such as those of a GAN


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def step_of(states: PyTree[Any]) -> int:
    """The number of steps taken; waits for the last one.

    **Raises:**

    `TypeError` if there is no state; `ValueError` if one was donated, or naming those that
    took other numbers of steps than the first.
    """
    found = jax.tree_util.tree_leaves_with_path(states, is_leaf=_is_state)
    others = [leaf for _, leaf in found if not _is_state(leaf)]
    if others or not found:
        raise UsageTypeError(
            f"a {type(others[0] if others else states).__name__} is not a TrainState; make "
            "one with init_state."
        )
    check_state_not_donated([state.step for _, state in found])
    steps = {leaf_path(path): int(jax.device_get(state.step)) for path, state in found}
    if len(set(steps.values())) > 1:
        says = ", ".join(f"{path} is at step {step}" for path, step in steps.items())
        raise UsageError(
            f"the states of a run must have taken the same number of steps, but {says}; "
            "let each of them take one step for each batch."
        )
    return next(iter(steps.values()))


def states_of(states: PyTree[Any]) -> list[TrainState]:
    """All states of a run."""
    return jax.tree.leaves(states, is_leaf=_is_state)


def trained_paths(states: PyTree[Any]) -> set[str]:
    """The paths of the arrays that training changes, as far as the states know."""
    paths: set[str] = set()
    found = jax.tree_util.tree_leaves_with_path(states, is_leaf=_is_state)
    for path, state in found:
        trained: PyTree[bool] = True
        if state.made_with is not None:
            # Of a model that was exchanged, nobody knows which arrays are trained.
            known = state.made_with.fits(state.model)
            trained = state.made_with.trainable(state.model) if known else False
        params, _ = split_model(state.model, trained)
        root = leaf_path((*path, jax.tree_util.GetAttrKey("model")))
        paths.update(path for path, _ in array_leaves(params, root))
    return paths


def map_models(
    states: PyTree[Any], model_of: Callable[[TrainState], PyTree] = lambda s: s.model
) -> PyTree[Any]:
    """The model of each state, as user code gets it: paired with its state, if any."""
    return jax.tree.map(
        lambda state: with_state(model_of(state), state.model_state),
        states,
        is_leaf=_is_state,
    )


# Where the arrays are stored


class StateLayout(NamedTuple):
    """Where the arrays of a state are stored between steps.

    - `model`: the sharding of each array of the model, `None` for its other leaves.
    - `update`: for each trained array the sharding of its gradient and its update, which
        under `zero1` is not that of the parameter.
    - `opt_state`: the sharding of each array of the optimizer's state.
    - `replicated`: the sharding of everything else.
    - `rule`: the rule that decided.
    """

    model: PyTree[NamedSharding | None]
    update: PyTree[NamedSharding | None]
    opt_state: PyTree[NamedSharding | None]
    replicated: NamedSharding
    rule: Rule

    @property
    def mesh(self) -> AnyMesh:
        """The mesh that a state is on."""
        return self.replicated.mesh  # pyright: ignore[reportReturnType]

    def of(self, state: TrainState) -> TrainState:
        """The shardings of a state, as a PyTree that is a prefix of it."""
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
    mesh: AnyMesh,
    rule: Rule,
) -> StateLayout:
    """Ask the rule about every array of a state.

    **Arguments:**

    - `model`, `opt_state`: those of the state, with arrays or `jax.ShapeDtypeStruct`s.
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
    """True if a leaf of the optimizer's state is kept in host memory between steps.

    Its sharding says so too, but not on devices that are only there to compile for.
    """
    return offloads(rule) and is_array(leaf) and leaf.shape != () and not is_key(leaf)


def fetch_offloaded(opt_state: PyTree, layout: StateLayout) -> PyTree:
    """Inside jit: an optimizer's state on the devices, wherever it is between steps."""
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
    state: TrainState, mesh: AnyMesh, rule: Rule, lower: Callable[[], jax.stages.Lowered]
) -> Iterator[str]:
    """Warnings about a rule, or axes of the mesh, that split nothing.

    **Arguments:**

    - `state`, `mesh`, `rule`: those of the step.
    - `lower`: lowers the step; called if an axis splits no array of the state, since the
        loss may still use the axis.
    """
    idle = _idle_axes(state, mesh)
    splits_none = len(idle) == sum(n > 1 for n in mesh.shape.values())
    if "fsdp" in idle or (idle and splits_none and rule != replicate()):
        remedy = (
            "another rule, such as eqxshard.fsdp() with a smaller min_size."
            if "fsdp" in idle
            else "another rule."
        )
        yield (
            f"{rule_name(rule)} splits no array over {comma_list(idle)} of the mesh "
            f"{format_mesh(used_axes(mesh.shape))}, so each device holds all of them; use "
            f"a mesh with an axis that the rule splits over, or {remedy}"
        )
    for axis in repeated_axes(state, mesh, lower):
        yield (
            f"{describe_repeated(axis, idle[axis])}; use them for data, or use a rule that "
            f"splits arrays over {axis}."
        )


def repeated_axes(
    state: TrainState, mesh: AnyMesh, lower: Callable[[], jax.stages.Lowered]
) -> list[str]:
    """The axes over which nothing is split, so that their devices repeat the same work.

    **Arguments:** as for `unused_axes`.
    """
    idle = [axis for axis in _idle_axes(state, mesh) if axis not in batch_axes(mesh)]
    return unsplit_axes(idle, lower)


def describe_repeated(axis: str, size: int) -> str:
    """A phrase on what is wrong with an axis of `repeated_axes`."""
    return f"nothing is split over {axis}={size}, so its devices repeat the same work"


def _idle_axes(state: TrainState, mesh: AnyMesh) -> dict[str, int]:
    """The axes that split no array of the model and the optimizer's state."""
    arrays = filter(is_array, jax.tree.leaves((state.model, state.opt_state)))
    split = {axis for array in arrays for axis in spec_axes(array.sharding.spec)}
    return {axis: n for axis, n in mesh.shape.items() if n > 1 and axis not in split}
