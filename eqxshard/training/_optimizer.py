"""Optimizers: their states and updates; and `per_layer`, for stacked layers.

Some optimizers look at the shapes of arrays. `per_layer` applies them to stacked layers
one by one. Muon and its kind also multiply each matrix with itself, again and again. If a
matrix is split, XLA would gather it, or sum parts of the product, on every device. So
before the first product `_map_layers` splits the stack by layers instead: an all-to-all
brings each device the whole matrices of its layers. After the last one, another brings the
result back (Liu et al., https://arxiv.org/abs/2502.16982).
"""

import collections
import functools as ft
import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import Literal
from ..sharding._explicit import constrain_to
from ..sharding._leaves import format_array, is_array, is_key, leaf_path, stacked_depth
from ..sharding._placement import named_leaves
from ..sharding._rule import leaf_dims
from ..sharding._spec import axes_of, spec_axes
from ..sharding._text import did_you_mean, first_few
from ._state import StateLayout
from .rewrite._interpreter import is_rewriting, run_rewritten
from .rewrite._jaxprs import (
    consts_of,
    equations,
    jaxprs_in,
    open_jaxpr,
    run_equations,
    variables,
)

#: The scope of an optimizer's update in a step.
UPDATE = "eqxshard_update"


def is_optimizer(given: Any) -> bool:
    """True if this is an optax optimizer."""
    return hasattr(given, "init") and hasattr(given, "update")


def check_optim(optim: Any) -> None:
    """Raise `TypeError` unless this is an optax optimizer."""
    if not is_optimizer(optim):
        name = getattr(optim, "__name__", type(optim).__name__)
        remedy = f"call it, as {name}(1e-3)" if callable(optim) else "use optax.adamw(1e-3)"
        raise UsageTypeError(f"optim={name} is not an optax optimizer; {remedy}.")


def takes_value(optim: optax.GradientTransformation) -> bool:
    """True if an optimizer's update may be given the value of the loss."""
    parameters = inspect.signature(optim.update).parameters
    return "value" in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )


class LayersState(optax.transforms.PartitionState):
    """The state of `per_layer`, whose update takes the shardings of gradients, too."""


def _has_layers(opt_state: PyTree) -> bool:
    """True if a `per_layer` is in an optimizer."""

    def is_one(node: Any) -> bool:
        return isinstance(node, LayersState)

    return any(map(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))


def init_optimizer(optim: optax.GradientTransformation, params: PyTree) -> PyTree:
    """The state of an optimizer, in which numbers are arrays."""
    return jax.tree.map(_as_array, optim.init(params))


def check_numbers(opt_state: PyTree) -> None:
    """Refuse numbers in a state that `init_state` did not make: they would never change."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if _is_number(leaf) and not isinstance(leaf, np.ndarray):
            raise UsageError(
                f"{leaf_path(path, 'opt_state')} is {leaf!r}, and a step changes arrays "
                "alone; make it one, with jnp.asarray."
            )


def _as_array(leaf: Any) -> Any:
    if not _is_number(leaf):
        return leaf
    # Not a weak type, which the first step would turn into another.
    return jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))


def _is_number(leaf: Any) -> bool:
    """True if this is a number of Python, or an array of numbers of NumPy."""
    if isinstance(leaf, np.ndarray | np.generic):
        return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool
    return type(leaf) in (bool, int, float, complex)


def apply_update(
    optim: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    loss: Float[Array, ""],
    params: PyTree,
    opt_state: PyTree,
    layout: StateLayout,
) -> tuple[PyTree, PyTree]:
    """The parameters and the optimizer's state after an update."""
    # Some optimizers use the value of the loss, too; a few do not accept it.
    extra: dict[str, Any] = {"value": loss} if takes_value(optim) else {}
    if _has_layers(opt_state):
        extra["shardings"] = layout.update
    try:
        with jax.named_scope(UPDATE):
            updates, new = optim.update(grads, opt_state, params, **extra)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise UsageError(
            f"the optimizer needs more than gradients and the value of the loss ({error}); "
            "use one without a line search, such as optax.lbfgs(linesearch=None)."
        ) from error
    # Unlike Equinox's, optax's own keeps the parameters' types.
    return optax.apply_updates(params, updates), _check_state(new, opt_state)


def _check_state(new: PyTree, old: PyTree) -> PyTree:
    """The state after an update, if it is like the one before in all but its values."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise UsageError(
            "the optimizer's update returned a state of another structure than its init: "
            f"{jax.tree.structure(new)} in place of {jax.tree.structure(old)}; return the "
            "same structure."
        )
    return jax.tree_util.tree_map_with_path(_check_leaf, new, old)


def _check_leaf(path: tuple[Any, ...], new: Any, old: Any) -> Any:
    name = leaf_path(path, "opt_state")
    if is_array(old):
        if _is_number(new):
            new = jnp.asarray(new, old.dtype)
        if not is_array(new) or (new.shape, new.dtype) != (old.shape, old.dtype):
            what = format_array(new) if is_array(new) else f"a {type(new).__name__}"
            raise UsageError(
                f"the optimizer's update made {name} {what}, and its init "
                f"{format_array(old)}; cast it to what it was."
            )
    elif is_array(new) or not (new is old or callable(new) or new == old):
        raise UsageError(
            f"the optimizer's update changed {name} from {old!r} to {new!r}, and a step "
            "changes arrays alone; keep it as an array."
        )
    return new


# Stacked layers

#: The scope of operations that look at one layer of a stack at a time.
PER_LAYER = "eqxshard_per_layer"


def per_layer(
    optim: optax.GradientTransformation, *stacks: str
) -> optax.GradientTransformationExtraArgs:
    """Apply an optimizer to stacked layers as if each were a module of its own.

    Layers are stacked for [`eqxshard.scan_layers`][], so their arrays have one dim more
    than those of a layer. Muon, Adafactor, LAMB, LARS, Novograd, SM3, clipping by block
    and masks such as `ndim >= 2` look at shapes, and would take a stack of biases for a
    matrix, or all layers for one. Adam, Lion and the like do not need this.

    The optimizer's update runs under [`jax.vmap`][] over the dim of layers, with a state
    for each layer that is sharded like its parameters. While it multiplies or factorizes
    matrices, as Muon does, a train step splits the stack by layers, if their number
    divides: each matrix is whole on one device, to which an all-to-all brings it (Liu et
    al., https://arxiv.org/abs/2502.16982). Everything else is updated by the
    optimizer as it is. This is an `optax.partition`: each of its optimizers sees the whole
    tree of parameters, with `optax.MaskedNode` in place of those that are not its own, so
    that masks and labels by path keep their meaning.

    Keep transformations outside that look at all parameters at once, such as clipping by
    the global norm, and [`eqxshard.ema_weights`][].

    **Arguments:**

    - `optim`: an optax optimizer.
    - `stacks`: the paths of the stacked modules, such as `"layers"` or
        `"encoder.layers"`: regular expressions that match from the start of a path to a
        dot or its end. All arrays of one module have the same leading dim.

    **Returns:**

    An optax optimizer.

    **Raises:**

    `TypeError` if `optim` is not an optimizer or no stack is named; `ValueError` if a path
    is not a regular expression; and from the `init` of the optimizer that is returned,
    `ValueError` if a path is that of no array, or of arrays without a common leading dim.

    !!! Example

        ```python
        optim = optax.chain(
            optax.clip_by_global_norm(1.0),
            eqxshard.per_layer(optax.contrib.muon(1e-3), "blocks"),
        )
        ```
    """
    check_optim(optim)
    patterns = _compile_patterns(stacks)
    optim = optax.with_extra_args_support(optim)

    def stack_of(path: tuple[Any, ...], _: Any) -> str:
        matches = (pattern.match(leaf_path(path)) for pattern in patterns)
        return next((match.group() for match in matches if match), "")

    def by_stack(tree: PyTree) -> optax.GradientTransformationExtraArgs:
        stacks = jax.tree_util.tree_map_with_path(stack_of, tree)
        names: list[Any] = jax.tree.leaves(stacks)
        optims = {**dict.fromkeys(names, _each_layer(optim)), "": optim}
        # A model may be callable, which would be taken for a function of labels.
        return optax.partition(optims, lambda _: stacks)

    def init(params: PyTree) -> Any:
        _check_found(patterns, params)
        state: Any = by_stack(params).init(params)
        return LayersState(*state)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        new, state = by_stack(updates).update(updates, state, params, **extra)
        return new, LayersState(*state)

    return optax.GradientTransformationExtraArgs(init, update)


def _each_layer(
    optim: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that updates each layer of stacked arrays by itself."""

    def init(params: PyTree) -> PyTree:
        numbers = jnp.arange(stacked_depth(params))

        def own_keys(leaf: Any) -> Any:
            if not (is_array(leaf) and is_key(leaf)):
                return leaf
            return jax.vmap(jax.random.fold_in)(leaf, numbers)

        return jax.tree.map(own_keys, jax.vmap(optim.init)(params))

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        shardings: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        update_layer = partial(optim.update, **extra)
        with jax.named_scope(PER_LAYER):
            return _map_layers(update_layer, (updates, state, params), shardings)

    return optax.GradientTransformationExtraArgs(init, update)


def _compile_patterns(stacks: Sequence[Any]) -> list[re.Pattern[str]]:
    if not stacks or not all(isinstance(stack, str) for stack in stacks):
        raise UsageTypeError(
            f"per_layer got {stacks} for the paths of the stacked layers; give them as "
            'text, as in per_layer(optim, "layers").'
        )
    try:
        return [re.compile(rf"(?:{stack})(?=\.|$)") for stack in stacks]
    except re.error as error:
        raise UsageError(
            f"per_layer: {stacks} are not all regular expressions ({error}); escape their "
            "special characters with a backslash."
        ) from None


def _check_found(patterns: list[re.Pattern[str]], params: PyTree) -> None:
    """Refuse a pattern that matches no path, or a list of layers that are not stacked.

    The path may be that of an array that is frozen or masked.
    """
    is_leaf = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_leaf)
    paths = [leaf_path(path) for path, _ in leaves]
    for pattern in patterns:
        if not any(map(pattern.match, paths)):
            stack = pattern.pattern.removeprefix("(?:").removesuffix(r")(?=\.|$)")
            words = {word for path in paths for word in path.split(".")}
            raise UsageError(
                f"per_layer: there are no layers at {stack!r}; {did_you_mean(stack, words)}"
                f"the paths are {first_few(paths)}."
            )
    for path, leaf in named_leaves(params):
        stack = next(filter(None, (pattern.match(path) for pattern in patterns)), None)
        if stack and re.match(r"\.\d+", path[stack.end() :]) and not is_stacked(leaf):
            raise UsageError(
                f"per_layer: {stack.group()!r} is a list, whose layers are not stacked; "
                f"leave it out, or name what is stacked: '{stack.group()}.0'."
            )


def is_stacked(leaf: Any) -> bool:
    """True if an array is annotated as that of stacked layers."""
    try:
        return leaf_dims(leaf)[:1] == ("layers",)
    except ValueError:  # A wrong annotation.
        return False


# Each matrix whole on one device

_FACTORIZATIONS = (
    "cholesky",
    "eigh",
    "householder_product",
    "lu",
    "qr",
    "schur",
    "svd",
    "triangular_solve",
)


def _map_layers(
    update: Callable[..., Any],
    args: Sequence[PyTree],
    shardings: PyTree[NamedSharding | None],
) -> Any:
    """`jax.vmap` of an optimizer's update of one layer.

    **Arguments:**

    - `update`: a function of gradients, a state and parameters.
    - `args`: these, stacked.
    - `shardings`: a PyTree of the shardings of all gradients; `None` if not known.
    """
    update_layers = jax.vmap(update)
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    known = {leaf_path(path): sharding for path, sharding in leaves}
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    stored = [known.get(leaf_path(path[1:])) for path, _ in leaves]
    depth = stacked_depth(args[0])
    owners = _find_owners([x for x in stored if x is not None], depth)
    if owners is None or not is_rewriting():
        return update_layers(*args)

    def rewrite(jaxpr: Any) -> Any:
        fn = lambda *leaves: _own(jaxpr, leaves, depth, stored, owners)  # noqa: E731
        return jax.make_jaxpr(fn)(*[x.aval for x in open_jaxpr(jaxpr).invars])

    jaxpr, out = jax.make_jaxpr(update_layers, return_shape=True)(*args)
    return run_rewritten(rewrite, jaxpr, out, args)[0]


def _find_owners(shardings: Sequence[NamedSharding], depth: int) -> NamedSharding | None:
    """A sharding that splits a stack by layers, over the axes that split its arrays.

    Axes that do not divide the number of layers are left out; `None` if all are.
    """
    split = {axis for each in shardings for axis in spec_axes(each.spec)}
    sizes = shardings[0].mesh.shape if shardings else {}
    axes = list[str]()
    for axis in [axis for axis, size in sizes.items() if axis in split and size > 1]:
        divides = depth % math.prod(sizes[each] for each in (*axes, axis)) == 0
        axes += [axis] if divides else []
    # Matrices of experts are a stack already.
    if not axes or "expert" in split:
        return None
    return NamedSharding(shardings[0].mesh, PartitionSpec(tuple(axes)))


def _own(
    jaxpr: Any,
    args: Sequence[Any],
    depth: int,
    shardings: Sequence[NamedSharding | None],
    owners: NamedSharding,
) -> list[Any]:
    """The outputs of an update of `depth` layers, computed by their `owners`.

    `shardings` are those of the inputs of the jaxpr.
    """
    inside = open_jaxpr(jaxpr)
    values = dict(zip(inside.invars, args, strict=True))
    values |= zip(inside.constvars, consts_of(jaxpr), strict=True)
    #: Arrays that are split as parameters are stored, and how. And for each array, its
    #: copy that is split by layers.
    stored, whole = dict(zip(inside.invars, shardings, strict=True)), dict[Any, Any]()

    def steps(x: Any) -> list[NamedSharding]:
        """One axis after the other: XLA would gather what moves along several at once."""
        rest = [PartitionSpec.UNCONSTRAINED] * (len(x.aval.shape) - 1)
        axes = axes_of(owners.spec[0])
        specs = [PartitionSpec(axes[:n], *rest) for n in range(1, len(axes))]
        return [*(NamedSharding(owners.mesh, spec) for spec in specs), owners]

    for eqn in inside.eqns:
        inputs = [x for x in variables(eqn.invars) if x in stored or x in whole]
        shapes = {x: x.aval.shape for x in inputs}
        matrices = [x for x in inputs if len(shapes[x]) > 2 and shapes[x][0] == depth]
        used = whole
        is_whole = False
        if _needs_matrices(eqn):
            for x in [x for x in matrices if x not in whole]:
                whole[x] = ft.reduce(constrain_to, steps(x), values[x])
        if all(x in whole for x in matrices):
            is_whole = bool(matrices)
        else:
            places = {shapes[x]: stored[x] for x in matrices if x not in whole}
            used = {}
            for x in matrices:
                place = places.get(shapes[x])
                if x not in stored and place is not None:
                    # Pinned to its owners first, or others would compute the last product.
                    moves = [*reversed(steps(x)), place]
                    used[x] = ft.reduce(constrain_to, moves, values[x])
            is_moved = eqn.primitive.name == "transpose"
            for x in eqn.outvars:
                stored[x] = None if is_moved else places.get(x.aval.shape)
        values |= run_equations([eqn], collections.ChainMap(used, values).__getitem__)
        if is_whole:
            whole.update((x, values[x]) for x in eqn.outvars if x in values)
    return [x.val if isinstance(x, Literal) else values[x] for x in inside.outvars]


def _needs_matrices(eqn: Any) -> bool:
    """True if an equation, or one inside of it, multiplies or factorizes matrices."""
    inside = (each for part in jaxprs_in(eqn.params) for each in equations(part))
    return any(map(_is_matrix_work, (eqn, *inside)))


def _is_matrix_work(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in _FACTORIZATIONS
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return all(len(contracted) + len(batch) < x.aval.ndim for x in eqn.invars)
