"""Make a training state, each array sharded from the start.

The model is made under jit, where arrays have no values; a model for which that would go
wrong is refused. Next door, `_make.py` computes the arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree, UInt32

from .._errors import UsageError, UsageTypeError
from .._jax import ClosedJaxpr, Literal
from ..distributed import assert_same_on_all_processes, spans_processes
from ..sharding._explicit import (
    computing_on_auto,
    is_explicit,
    no_explicit_context,
    user_axes,
)
from ..sharding._leaves import array_leaves, as_weak_as, format_array, is_array, is_key
from ..sharding._mesh import check_is_mesh, check_mesh, devices_of
from ..sharding._placement import named_leaves
from ..sharding._rule import Rule, check_rule
from ..sharding._spec import AnyMesh
from ._advice import explaining_state, short_traceback
from ._donation import any_donated, copy_shared
from ._jit import jit_is_off
from ._make import ArrayBuilder
from ._optimizer import check_optim, init_optimizer
from ._precision import LossScale, Precision, cast
from ._state import (
    MadeWith,
    TrainState,
    flatten_state,
    make_layout,
    split_model,
    state_indices,
    unflatten_state,
    without_state,
)
from .rewrite._jaxprs import map_jaxpr, open_jaxpr, scan_counts
from .rewrite._types import erase_types

#: Stands for an array among leaves.
_HERE = object()


def init_state(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    *,
    key: Key[Array, ""] | UInt32[Array, "2"],
    mesh: Mesh,
    rule: Rule,
    trainable: PyTree = True,
    precision: Precision | None = None,
    load: Callable[[Any], PyTree] | None = None,
) -> TrainState:
    """Make a model and its optimizer state, each array sharded from the start.

    `make_model` is traced as by jit, and each array is made in its sharding, so none is
    ever whole on one device or on the host unless the rule says so or it is small (at
    most 65,536 elements, as keys mostly are), and JAX's usual initialisers draw in
    parts. (Some cannot, and are whole for a moment: QR in `orthogonal`,
    `jax.random.permutation`, keys of `rbg`.) The values drawn do not depend on the mesh;
    only sums over split arrays may round differently. Equal layers share compiled programs.

    **Arguments:**

    - `make_model`: a function from a random key to a model, or to the pair of a model and
        its state that `equinox.nn.make_with_state` makes. An array that is trained in two
        places must be tied with `equinox.nn.Shared`. For a model that you have already, or
        that cannot be made under jit, `lambda key: model`: it is whole on one device before
        it is split, and the state gets copies, because steps donate its arrays.
    - `optim`: an optax optimizer, for the model's floating-point (and complex) arrays.
    - `key`: a random key. `make_model` gets it unchanged; the run's own key is derived
        from it.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: how to split each array of the model; the optimizer's state follows.
    - `trainable`: which of the model's floating-point (and complex) arrays to train: a
        filter spec as for `equinox.partition`, that is `True`, or a PyTree of booleans
        and of functions from leaves to booleans that is a prefix of the model. The others
        are frozen: they have no gradient and no optimizer state.
    - `precision`: the types of parameters and of computation; by default those that
        `make_model` chooses.
    - `load`: a function that loads weights, such as by [`eqxshard.load_weights`][], into
        the model that it gets, which has a `jax.ShapeDtypeStruct` with its sharding for
        each array. `make_model` makes the arrays that it leaves as they are. The
        optimizer's state is made for the loaded weights. The state takes them over
        without a copy, so steps donate them.

    **Returns:**

    An [`eqxshard.TrainState`][] at step 0.

    **Raises:**

    `TypeError` if `key` is not a random key, `make_model` not a function or `optim` not
    an optimizer; `ValueError` as [`eqxshard.shardings`][] does, if one array is trained in
    two places (the two would drift apart), if `load` returns another model, and under
    `jax_disable_jit`. Any error of `make_model`, with a note if it cannot run under jit.

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
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise jit_is_off()
    check_is_mesh(mesh)
    with short_traceback(), no_explicit_context(), jax.transfer_guard("allow"):
        traced = _trace(make_model, optim, key, mesh, rule, trainable, precision)
        like = traced.like
        parts = {"parameters": like.model, "optimizer state": like.opt_state}
        with explaining_state(parts):
            loaded = {} if load is None else _load(load, like.model)
            return _build(traced, optim, key, loaded)


def complete_state(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    *,
    key: Key[Array, ""] | UInt32[Array, "2"],
    mesh: Mesh,
    rule: Rule,
    trainable: PyTree = True,
    precision: Precision | None = None,
    known: Mapping[str, Array],
) -> TrainState:
    """As [`eqxshard.init_state`][], but some arrays of the state are known, by path.

    Only the others are made; those of the optimizer are made for the known parameters.
    """
    with short_traceback(), no_explicit_context(), jax.transfer_guard("allow"):
        traced = _trace(make_model, optim, key, mesh, rule, trainable, precision)
        paths = [path for path, _ in array_leaves(traced.like)]
        arrays = {i: known[path] for i, path in enumerate(paths) if path in known}
        return _build(traced, optim, key, arrays)


def _build(
    traced: "_Traced",
    optim: optax.GradientTransformation,
    key: Any,
    known: Mapping[int, Array],
) -> TrainState:
    """Make the arrays of a state that was traced, but for those that are known already."""
    leaves, static = flatten_state(traced.like)
    builder = ArrayBuilder()
    model = builder.call(traced.make_model, [key])
    # Among the arrays of a state, those of the model come after the step.
    for i in range(len(array_leaves(traced.like.model))):
        model[i] = known.get(i + 1, model[i])
    outputs = builder.call(traced.make_state, [*model, key])
    left = [i for i in range(len(leaves)) if i not in known]
    wanted = [outputs[i] for i in left], [leaves[i].sharding for i in left]
    arrays = {**known, **dict(zip(left, builder.build(*wanted), strict=True))}
    made = [as_weak_as(arrays[i], leaf) for i, leaf in enumerate(leaves)]
    return unflatten_state(made, static)


def abstract_state(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    *,
    key: Key[Array, ""] | UInt32[Array, "2"],
    mesh: AnyMesh,
    rule: Rule,
    trainable: PyTree = True,
    precision: Precision | None = None,
) -> TrainState:
    """The shapes, types and shardings of the state of [`eqxshard.init_state`][].

    Nothing is allocated, so [`eqxshard.Checkpointer.restore`][] into it needs no memory
    but that of the state itself.

    **Arguments:**

    - `make_model`, `optim`, `key`, `rule`, `trainable`, `precision`: as for
        [`eqxshard.init_state`][].
    - `mesh`: from [`eqxshard.make_mesh`][], or a `jax.sharding.AbstractMesh` with an
        `abstract_device`, for devices that are not there.

    **Returns:**

    An [`eqxshard.TrainState`][] with a `jax.ShapeDtypeStruct`, including its sharding,
    for each array.

    **Raises:**

    As [`eqxshard.init_state`][] does.

    !!! Example

        ```python
        like = eqxshard.abstract_state(make_model, optim, key=key, mesh=mesh, rule=rule)
        state = checkpointer.restore(like)
        ```
    """
    with short_traceback():
        return _trace(make_model, optim, key, mesh, rule, trainable, precision).like


class _Traced(NamedTuple):
    """The traced functions that make a state, so that the user's code runs once.

    - `like`: the state, with a `jax.ShapeDtypeStruct` for each array.
    - `make_model`: from a key to the arrays of the model, then those of its own state.
    - `make_state`: from those and the key to the arrays of the state, in order.
    """

    like: TrainState
    make_model: ClosedJaxpr
    make_state: ClosedJaxpr


def _trace(
    make_model: Callable[[Any], PyTree],
    optim: optax.GradientTransformation,
    key: Any,
    mesh: AnyMesh,
    rule: Rule,
    trainable: PyTree,
    precision: Precision | None,
) -> _Traced:
    """Trace the functions that make a state, and decide the shardings of its arrays."""
    check_mesh(mesh)
    check_optim(optim)
    check_function(make_model)
    if not isinstance(key, jax.Array):
        raise UsageTypeError(f"key={key!r} is not a random key; use jax.random.key(0).")
    check_not_taken(key)
    if spans_processes(devices_of(mesh)):
        data = np.asarray(jax.random.key_data(key) if is_key(key) else key)
        assert_same_on_all_processes("state", {"key": data.tolist()})

    def make(key: Array) -> tuple[tuple[MadeWith, PyTree, PyTree], PyTree]:
        """The model, and last the arrays that are trained, as `make_model` made them."""
        model, model_state = make_traced(make_model, key)
        params, frozen = split_model(model, trainable)
        check_not_shared(params)
        leaves = jax.tree.structure(model).flatten_up_to(params)
        trained = trainable is True or tuple(leaf is not None for leaf in leaves)
        stored = params if precision is None else cast(params, precision.params)
        made_with = MadeWith(rule, trained, precision)
        return (made_with, eqx.combine(stored, frozen), model_state), params

    def make_state(made: tuple[MadeWith, PyTree, PyTree], key: Array) -> tuple[Any, PyTree]:
        made_with, model, model_state = made
        params, _ = split_model(model, made_with.trainable(model))
        loss_scale = None
        if precision is not None and precision.scales_loss:
            loss_scale = LossScale.init(precision)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            model=model,
            opt_state=init_optimizer(optim, params),
            # Any number works that `make_model` does not fold in itself.
            key=jax.random.fold_in(key, 2**32 - 1),
            model_state=model_state,
            loss_scale=loss_scale,
            made_with=made_with,
        )
        return state, params

    # A key may have a type of its own, on the axes of `jax.set_mesh`.
    like: Any = jax.ShapeDtypeStruct(key.shape, key.dtype)
    with user_axes(mesh):
        model_jaxpr, (made, params) = _trace_arrays(make, like)
    model_jaxpr = _without_params(model_jaxpr, params)
    if is_explicit(mesh):
        # Otherwise random arrays would be whole, as their types say, until they are split.
        model_jaxpr = erase_types(model_jaxpr)
    with computing_on_auto(mesh):
        state_jaxpr, (state, params) = _trace_arrays(make_state, made, like)
    check_rule(rule, dict(named_leaves(state.model)), mesh)
    layout = make_layout(state.model, params, state.opt_state, mesh, rule)
    shardings = iter(layout.flat(state))

    def shaped(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=next(shardings), weak_type=leaf.weak_type
        )

    return _Traced(jax.tree.map(shaped, state), model_jaxpr, state_jaxpr)


def _trace_arrays(fn: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """As `equinox.filter_make_jaxpr`, in fewer passes over PyTrees.

    **Arguments:**

    - `fn`: a function of PyTrees.
    - `args`: its arguments, with a `jax.ShapeDtypeStruct` for each array.

    **Returns:**

    A jaxpr from the arrays of the arguments to those of the result; and the result, with a
    `jax.ShapeDtypeStruct` for each array.
    """
    given, structure = jax.tree.flatten(args)
    out: dict[str, Any] = {}

    def flat(*arrays: Array) -> list[Any]:
        left = iter(arrays)
        leaves = [next(left) if is_array(leaf) else leaf for leaf in given]
        made, out["structure"] = jax.tree.flatten(
            fn(*jax.tree.unflatten(structure, leaves))
        )
        out["leaves"] = [_HERE if eqx.is_array(leaf) else leaf for leaf in made]
        return [leaf for leaf in made if eqx.is_array(leaf)]

    jaxpr = jax.make_jaxpr(flat)(*filter(is_array, given))
    avals = iter(jaxpr.out_avals)
    leaves = [_shape(next(avals)) if leaf is _HERE else leaf for leaf in out["leaves"]]
    return jaxpr, jax.tree.unflatten(out["structure"], leaves)


def _without_params(jaxpr: ClosedJaxpr, params: PyTree) -> ClosedJaxpr:
    """A jaxpr without its last outputs, `params`, no two of which may be one array."""
    inside: Any = open_jaxpr(jaxpr)
    count = len(inside.outvars) - len(jax.tree.leaves(params))
    check_not_shared(params, origins(inside, inside.invars)[count:])
    outvars = inside.outvars[:count]
    return map_jaxpr(lambda part: part.replace(outvars=outvars), jaxpr)


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without the sharding that its type may have."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _load(load: Callable[[Any], PyTree], like: PyTree) -> dict[int, Array]:
    """The arrays of the model that `load` returns, by their number in the state."""
    wanted, found = array_leaves(like), array_leaves(load(like))
    was, now = ({path: format_array(x) for path, x in each} for each in (wanted, found))
    if was != now:
        path = next(path for path in {**was, **now} if was.get(path) != now.get(path))
        raise UsageError(
            f"load returned {path} as {now.get(path, 'nothing')}, and the model has "
            f"{was.get(path, 'none there')}; return what load_weights(path, like) returns."
        )
    placed = {
        i: jax.device_put(x, leaf.sharding)
        for i, ((_, leaf), (_, x)) in enumerate(zip(wanted, found), start=1)
        if isinstance(x, jax.Array)
    }
    return dict(zip(placed, copy_shared([*placed.values()])))


# Make a model under jit

#: The errors of JAX for code that needs the value of an array under jit.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
#: Equations that call a function once.
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)


def check_function(make_model: Any) -> None:
    """Refuse a model in the place of a function that makes one."""
    is_model = isinstance(make_model, eqx.Module) and array_leaves(make_model)
    if is_model or not callable(make_model):
        raise UsageTypeError(
            f"make_model is a {type(make_model).__name__}, and init_state takes a function "
            "of a key; for a model that you have already, write lambda key: model."
        )


def make_traced(
    make_model: Callable[[Any], PyTree], key: Array
) -> tuple[PyTree, eqx.nn.State | None]:
    """A model and its state, if it has one; `key` is traced."""
    try:
        model, model_state = without_state(make_model(key))
    except _NEEDS_VALUES as error:
        error.add_note(
            "init_state runs make_model under jit, where arrays have no values; make the "
            "model first and write make_model=lambda key: model (it is then whole on one "
            "device before it is split)."
        )
        raise
    check_has_arrays(model)
    if model_state is None:
        _check_state_is_apart(model)
    check_not_taken((model, model_state))
    return model, model_state


def check_has_arrays(model: PyTree) -> None:
    """Refuse a model without arrays: nothing could be trained, sharded or saved."""
    if not array_leaves(model):
        raise UsageError(
            f"the model ({type(model).__name__}) has no arrays, so there is nothing to "
            "train; give it parameters, in fields that are not static."
        )


def _check_state_is_apart(model: PyTree) -> None:
    """Refuse a model that holds the first value of its own state, as if to be trained."""
    indices = [node for _, node in state_indices(model)]
    if array_leaves(indices):
        path, _ = state_indices(model)[0]
        raise UsageError(
            f"{path or 'the model'} has state, as BatchNorm has, and make_model returned "
            "none; write init_state(eqx.nn.make_with_state(make_model), ...)."
        )


def check_not_taken(arrays: PyTree) -> None:
    """Refuse a key, or a model, that a step has taken."""
    if any_donated(jax.tree.leaves(arrays)):
        raise UsageError(
            "the key, or the model that make_model returns, was donated to a step; use "
            "those of the newest state, or copies."
        )


def check_not_shared(params: PyTree, outputs: Sequence[Any] | None = None) -> None:
    """Refuse an array that is trained in two places.

    **Arguments:**

    - `params`: the trained arrays.
    - `outputs`: for each of them a value from `origins`; by default, the array's `id`.
    """
    leaves = array_leaves(params)
    keys = [id(leaf) for _, leaf in leaves] if outputs is None else outputs
    paths: dict[Any, str] = {}
    for (path, _), key in zip(leaves, keys, strict=True):
        first = paths.setdefault(key, path)
        if first != path:
            raise UsageError(
                f"{first} and {path} are the same array, and would be trained as two; tie "
                "them with equinox.nn.Shared, make one a copy with jnp.copy, or train only "
                "one with trainable=."
            )


def origins(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """A value for each output of a jaxpr, the same for outputs that are one array.

    To JAX, each output of a function under `jax.jit` and the like is an array of its own,
    even if the function returned one array twice.

    **Arguments:**

    - `jaxpr`: an open jaxpr.
    - `inputs`: values for its inputs, the same for inputs that are one array.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return object() if isinstance(atom, Literal) else known.setdefault(atom, atom)

    for eqn in jaxpr.eqns:
        name, outputs = eqn.primitive.name, [object() for _ in eqn.outvars]
        part = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in _CALLS:
            outputs = origins(open_jaxpr(part), [*map(read, eqn.invars)])
        elif name == "scan":
            # Values that it carries change in each iteration. The others are stacked.
            _, carried = scan_counts(eqn)
            inside = open_jaxpr(part)
            found = origins(inside, [object() for _ in inside.invars])
            whole = id(eqn)
            outputs[carried:] = [(whole, value) for value in found[carried:]]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, jaxpr.outvars)]
