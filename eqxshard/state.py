"""`TrainState`: all that a step changes; sharded at birth."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree, UInt32

from .distributed import agree, is_shared
from .mesh import check_mesh
from .precision import LossScale, Precision, cast
from .rules import HOST_MEMORY, Rule, offloads, optimizer_rule
from .sharding import filter_shard, is_array, is_key, leaf_path, place, shardings, spread
from .transforms import Skeleton, split


class TrainState(eqx.Module):
    """Everything that changes from step to step.

    - `step`: how many steps were taken.
    - `model`: the model, with its parameters where the rule says.
    - `opt_state`: the optimizer's state, each part of it where its parameter is.
    - `key`: the run's random key. It stays the same: each step folds its number in, so
        that a resumed run draws what the uninterrupted one would have drawn.
    - `model_state`: the `equinox.nn.State` of a model that has one, such as the running
        statistics of `BatchNorm`; otherwise `None`.
    - `loss_scale`: what the loss is multiplied by, for float16; otherwise `None`.
    """

    step: Int[Array, ""]
    model: PyTree
    opt_state: PyTree
    key: Key[Array, ""] | UInt32[Array, "2"]
    # By factories: a plain default would be found on the class, before the fields that
    # are not built yet.
    model_state: eqx.nn.State | None = eqx.field(default_factory=lambda: None)
    loss_scale: LossScale | None = eqx.field(default_factory=lambda: None)

    # A step hands on its arrays as the flat list that the next step wants, and the
    # modules around them are built when somebody first looks. Building them costs more
    # than the rest of the dispatch, and a training loop rarely looks. `__slots__` keeps
    # the list out of the fields; `__dict__` is what `jax.tree` and `dataclasses` read.
    __slots__ = ("_flat",)

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore
        fields = _FIELDS.__get__(self)
        flat = getattr(self, "_flat", None)
        if not fields and flat is not None:
            arrays, skeleton = flat
            fields.update(_FIELDS.__get__(skeleton.merge(arrays)))
        return fields

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what it does not find: a field that is not built yet.
        if name in TrainState.__dataclass_fields__ and name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"TrainState has no attribute {name!r}.")

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


# The `__dict__` that Python itself keeps for each instance.
_FIELDS = eqx.Module.__dict__["__dict__"]
# By the descriptor, as modules look names up in Python.
_FLAT = TrainState.__dict__["_flat"]


def init_state(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    *,
    key: Key[Array, ""] | UInt32[Array, "2"],
    mesh: Mesh,
    rule: Rule,
    trainable: PyTree = True,
    precision: Precision | None = None,
) -> TrainState:
    """Make a model and its optimizer state, each array born where it will lie.

    `make_model` runs under jit with output shardings: what comes out is never whole on
    one device or on the host, unless the rule says so, and what JAX's usual initialisers
    draw is drawn in parts. (Some cannot be, and are whole for a moment: QR in
    `orthogonal`, `jax.random.permutation`, keys of `rbg`.) What is drawn does not depend
    on the mesh; sums over what is split may round otherwise.

    **Arguments:**

    - `make_model`: a function from a random key to a model, or to the pair of a model and
        its state that `equinox.nn.make_with_state` makes. An array that stands in two
        places of it must be tied with `equinox.nn.Shared`.
    - `optim`: an optax optimizer, for the model's floating-point (and complex) arrays.
    - `key`: a random key: `make_model` gets it as it is, and the run's own key is
        derived from it.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: where each array of the model lies; the optimizer's state follows.
    - `trainable`: which of the model's floating-point (and complex) arrays are trained:
        a filter spec as for `equinox.partition`, that is `True`, or a PyTree of
        booleans and of functions from leaves to booleans that is a prefix of the model.
        The others are frozen: they have no gradient and no optimizer state.
    - `precision`: the types of parameters and of computation; by default those that
        `make_model` gives them.

    **Returns:**

    An [`eqxshard.TrainState`][] at step 0.

    **Raises:**

    `TypeError` if `key` is not one; `ValueError` as [`eqxshard.shardings`][] does, and if
    one array stands in two places of the model: they would drift apart.

    !!! Example

        ```python
        state = eqxshard.init_state(
            lambda key: eqx.nn.MLP(784, 10, 512, 2, key=key),
            optax.adamw(1e-3),
            key=jax.random.key(0),
            mesh=mesh,
            rule=eqxshard.fsdp(),
        )
        ```
    """
    options = {"trainable": trainable, "precision": precision}
    like = abstract_state(make_model, optim, key=key, mesh=mesh, rule=rule, **options)
    leaves, skeleton = split(like)
    make = _maker(make_model, optim, trainable, precision)

    def born(numbers: Array) -> list[Array]:
        if is_key(key):
            numbers = jax.random.wrap_key_data(numbers, impl=key.dtype)
        return split(make(numbers)[0])[0]

    # From the key's numbers on the host, which all processes have.
    whole = NamedSharding(mesh, PartitionSpec())
    places = [leaf.sharding for leaf in leaves]
    arrays = jax.jit(born, in_shardings=whole, out_shardings=places)(_numbers(key))
    return unflatten_state(arrays, skeleton.shaped(arrays))


def abstract_state(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    *,
    key: Key[Array, ""] | UInt32[Array, "2"],
    mesh: Mesh,
    rule: Rule,
    trainable: PyTree = True,
    precision: Precision | None = None,
) -> TrainState:
    """What [`eqxshard.init_state`][] would make, without making it.

    For [`eqxshard.Checkpointer.restore`][], which then needs no memory but that of the
    state itself.

    **Arguments:**

    - `make_model`, `optim`, `key`, `mesh`, `rule`, `trainable`, `precision`: as for
        [`eqxshard.init_state`][].

    **Returns:**

    An [`eqxshard.TrainState`][] that has a `jax.ShapeDtypeStruct`, with its sharding, in
    the place of each array.

    **Raises:**

    As [`eqxshard.init_state`][] does.

    !!! Example

        ```python
        like = eqxshard.abstract_state(make_model, optim, key=key, mesh=mesh, rule=rule)
        state = checkpointer.restore(like)
        ```
    """
    check_mesh(mesh)
    if not isinstance(key, jax.Array):
        raise TypeError(f"key={key!r} is not a random key; use jax.random.key(0).")
    if is_shared(mesh.devices.flat):
        agree("state", {"key": _numbers(key).tolist()})
    make = _maker(make_model, optim, trainable, precision)
    state, params = eqx.filter_eval_shape(make, key)
    # Whether the rule fits all of the model: later it is asked about parts.
    shardings(state.model, mesh, rule)
    places = state_shardings(state, params, optim, mesh, rule)
    leaves, skeleton = split(state)
    return skeleton.merge(
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
            for leaf, there in zip(leaves, places, strict=True)
        ]
    )


def _numbers(key: Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key) if is_key(key) else key)


def _maker(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    trainable: PyTree,
    precision: Precision | None,
) -> Callable[[Array], tuple[TrainState, PyTree]]:
    """A function from a key to a state at step 0, and to what of its model is trained."""

    def make(key: Array) -> tuple[TrainState, PyTree]:
        model, model_state = without_state(make_model(key))
        _check_not_shared(model)
        if precision is not None:
            model = cast(model, precision.params)
        params, _ = split_model(model, trainable)
        loss_scale = None
        if precision is not None and precision.scales_loss:
            loss_scale = LossScale.init(precision)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            model=model,
            opt_state=optim.init(params),
            # Any number will do that `make_model` does not fold in itself.
            key=jax.random.fold_in(key, 2**32 - 1),
            model_state=model_state,
            loss_scale=loss_scale,
        )
        return state, params

    return make


def state_shardings(
    state: TrainState,
    params: PyTree,
    optim: optax.GradientTransformation,
    mesh: Mesh,
    rule: Rule,
) -> list[Any]:
    """Where each array of a state lies, in the order of `flatten_state`."""
    whole = NamedSharding(mesh, PartitionSpec())
    opt_state = opt_state_shardings(state.opt_state, params, optim, mesh, rule)
    rest = (state.key, state.model_state, state.loss_scale)
    return [
        whole,
        *spread(place(state.model, mesh, rule), state.model),
        *jax.tree.leaves(opt_state),
        *[whole for leaf in jax.tree.leaves(rest) if is_array(leaf)],
    ]


def opt_state_shardings(
    opt_state: PyTree,
    params: PyTree,
    optim: optax.GradientTransformation,
    mesh: Mesh,
    rule: Rule,
) -> PyTree[NamedSharding | None]:
    """Where each array of an optimizer's state lies: where its parameter is updated."""
    whole, offloaded = NamedSharding(mesh, PartitionSpec()), offloads(rule)

    def follow(leaf: Any, param: Any, there: NamedSharding) -> Any:
        # Factored states (Adafactor's) have other shapes than their parameters.
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        there = there if leaf.shape == param.shape else whole
        return there.with_memory_kind(HOST_MEMORY) if offloaded and leaf.shape else there

    return optax.tree_utils.tree_map_params(
        optim,
        follow,
        opt_state,
        params,
        place(params, mesh, optimizer_rule(rule)),
        transform_non_params=lambda leaf: whole if is_array(leaf) else None,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )


def on_device(arrays: Sequence[Array], places: Sequence[NamedSharding]) -> list[Array]:
    """Fetch the arrays that lie in the host's memory between steps."""
    return [
        jax.device_put(array, there.with_memory_kind("device"))
        if there.memory_kind == HOST_MEMORY
        else array
        for array, there in zip(arrays, places, strict=True)
    ]


def on_host(arrays: Sequence[Array], places: Sequence[NamedSharding]) -> list[Array]:
    """Constrain arrays to where they lie between steps, some in the host's memory."""
    on_device = [NamedSharding(there.mesh, there.spec) for there in places]
    return [
        jax.device_put(array, there) if there.memory_kind == HOST_MEMORY else array
        for array, there in zip(filter_shard([*arrays], on_device), places, strict=True)
    ]


def split_model(model: PyTree, trainable: PyTree) -> tuple[PyTree, PyTree]:
    """A model's trained arrays, and the rest of it."""
    try:
        chosen, rest = eqx.partition(model, trainable)
    except ValueError as error:
        raise ValueError(
            "trainable is not a prefix of the model; make it from the model, such as with "
            f"jax.tree.map(lambda _: False, model) and equinox.tree_at. ({error})"
        ) from None
    params, other = eqx.partition(chosen, is_param)
    return params, eqx.combine(other, rest)


def with_state(model: PyTree, model_state: eqx.nn.State | None) -> PyTree:
    """A model as user code gets it: with its state, if it has one."""
    return model if model_state is None else (model, model_state)


def without_state(made: PyTree) -> tuple[PyTree, eqx.nn.State | None]:
    """The reverse of `with_state`."""
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State):
        return made
    return made, None


def _check_not_shared(model: PyTree) -> None:
    seen: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if is_array(leaf):
            name = leaf_path(path)
            first = seen.setdefault(id(leaf), name)
            if first != name:
                raise ValueError(
                    f"{first} and {name} are the same array, and would be trained as two; "
                    "tie them with equinox.nn.Shared."
                )


def is_param(leaf: Any) -> bool:
    """Whether a leaf is trained: a floating-point (or complex) array."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def flatten_state(state: TrainState) -> tuple[list[Any], Skeleton]:
    """A state's arrays and the rest of it: at no cost if it came from a step."""
    flat = flat_of(state)
    if flat is not None:
        return flat
    if not isinstance(state, TrainState):
        raise TypeError(
            f"a {type(state).__name__} is not a TrainState; make one with init_state."
        )
    if not is_array(state.step) or not is_array(state.key):
        raise TypeError(
            "the step or the key of this TrainState is no array; write jnp.int32(0), and "
            "jax.random.key(0)."
        )
    arrays, skeleton = split(state)
    return arrays, skeleton.shaped(arrays)


def flat_of(state: Any) -> tuple[list[Array], Skeleton] | None:
    """What `flatten_state` gives for a state that a step or `init_state` returned."""
    try:
        return _FLAT.__get__(state)
    except (AttributeError, TypeError):
        return None


def unflatten_state(arrays: list[Array], skeleton: Skeleton) -> TrainState:
    """The reverse of `flatten_state`, at no cost until somebody looks inside."""
    state = object.__new__(TrainState)
    object.__setattr__(state, "_flat", (arrays, skeleton))
    return state
