"""Optimizers: their states, of which a step changes the arrays and nothing else."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .._errors import UsageError, UsageTypeError
from ..sharding._leaves import format_array, is_array, leaf_path
from ._layout import StateLayout

#: The scope of an optimizer's update in a step.
UPDATE = "eqxshard_update"


def is_optimizer(given: Any) -> bool:
    """Whether this is an optax optimizer."""
    return hasattr(given, "init") and hasattr(given, "update")


def check_optim(optim: Any) -> None:
    """Raise `TypeError` unless this is an optax optimizer."""
    if not is_optimizer(optim):
        name = getattr(optim, "__name__", type(optim).__name__)
        remedy = f"call it, as {name}(1e-3)" if callable(optim) else "use optax.adamw(1e-3)"
        raise UsageTypeError(f"optim={name} is not an optax optimizer; {remedy}.")


def takes_value(optim: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update may be given the value of the loss."""
    parameters = inspect.signature(optim.update).parameters
    return "value" in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )


class LayersState(optax.transforms.PartitionState):
    """The state of `per_layer`, whose update takes the shardings of gradients, too."""


def _has_layers(opt_state: PyTree) -> bool:
    """Whether a `per_layer` is in an optimizer."""

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
    """Whether this is a number of Python's, or an array of NumPy's."""
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
    # Some optimizers use the value of the loss, too; a few cannot be given it.
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
