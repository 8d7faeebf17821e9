"""`TrainState`: all that a step changes; sharded at birth."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree, UInt32

from .mesh import check_mesh
from .rules import Rule
from .sharding import is_array, leaf_path, shardings, spread
from .transforms import Skeleton, split


class TrainState(eqx.Module):
    """Everything that changes from step to step.

    - `step`: how many steps were taken.
    - `model`: the model, with its parameters where the rule says.
    - `opt_state`: the optimizer's state, each part of it where its parameter is.
    - `key`: the run's random key. It stays the same: each step folds its number in, so
        that a resumed run draws what the uninterrupted one would have drawn.
    """

    step: Int[Array, ""]
    model: PyTree
    opt_state: PyTree
    key: Key[Array, ""] | UInt32[Array, "2"]

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


def init_state(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    *,
    key: Key[Array, ""] | UInt32[Array, "2"],
    mesh: Mesh,
    rule: Rule,
) -> TrainState:
    """Make a model and its optimizer state, each array born where it will lie.

    `make_model` runs under jit with output shardings: no array is ever whole on one
    device or on the host, unless the rule says so. The values do not depend on the mesh.

    **Arguments:**

    - `make_model`: a function from a random key to a model. An array that stands in two
        places of it must be tied with `equinox.nn.Shared`.
    - `optim`: an optax optimizer, for the model's floating-point (and complex) arrays.
    - `key`: a random key: `make_model` gets it as it is, and the run's own key is
        derived from it.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: where each array of the model lies; the optimizer's state follows.

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
    check_mesh(mesh)
    if not isinstance(key, jax.Array):
        raise TypeError(f"key={key!r} is not a random key; use jax.random.key(0).")

    def make(key: Array) -> TrainState:
        model = make_model(key)
        _check_not_shared(model)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            model=model,
            opt_state=optim.init(eqx.filter(model, is_param)),
            # Any number will do that `make_model` does not fold in itself.
            key=jax.random.fold_in(key, 2**32 - 1),
        )

    key = jax.device_put(key, NamedSharding(mesh, PartitionSpec()))
    shapes = eqx.filter_eval_shape(make, key)
    places = state_shardings(shapes, optim, mesh, rule)
    arrays = jax.jit(lambda key: split(make(key))[0], out_shardings=places)(key)
    return unflatten_state(arrays, split(shapes)[1].shaped(arrays))


def state_shardings(
    state: TrainState, optim: optax.GradientTransformation, mesh: Mesh, rule: Rule
) -> list[Any]:
    """Where each array of a state lies, in the order of `flatten_state`."""
    whole = NamedSharding(mesh, PartitionSpec())
    params = eqx.filter(state.model, is_param)

    def follow(leaf: Any, param: Any, place: NamedSharding) -> Any:
        # Factored states (Adafactor's) have other shapes than their parameters.
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return place if leaf.shape == param.shape else whole

    opt_state = optax.tree_utils.tree_map_params(
        optim,
        follow,
        state.opt_state,
        params,
        shardings(params, mesh, rule),
        transform_non_params=lambda leaf: whole if is_array(leaf) else None,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    return [
        whole,
        *spread(shardings(state.model, mesh, rule), state.model),
        *jax.tree.leaves(opt_state),
        whole,
    ]


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
    if came_from_step(state):
        return state._flat  # pyright: ignore
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


def came_from_step(state: TrainState) -> bool:
    """Whether a state is as a step or `init_state` returned it, with all of it placed."""
    return hasattr(state, "_flat")


def unflatten_state(arrays: list[Array], skeleton: Skeleton) -> TrainState:
    """The reverse of `flatten_state`, at no cost until somebody looks inside."""
    state = object.__new__(TrainState)
    object.__setattr__(state, "_flat", (arrays, skeleton))
    return state
