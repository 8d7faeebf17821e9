"""Make a model as by jit, where arrays have no values, and refuse what would go wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import Literal
from ..sharding._leaves import array_leaves
from ._donation import any_donated
from ._state import state_indices, without_state
from .rewrite._jaxprs import open_jaxpr, scan_counts

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
    """Refuse a model of which nothing could be trained, sharded or saved."""
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
    - `outputs`: for each of them what it is, as `origins` says it; by default, the object.
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
    """For each output of a jaxpr a value, the same for those that are one array.

    Of a function under `jax.jit` and the like, each output is an array of its own to JAX,
    even if the function returned one array twice.

    **Arguments:**

    - `jaxpr`: an open jaxpr.
    - `inputs`: such values for its inputs.
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
            # What it carries changes from turn to turn. The rest, it stacks.
            _, carried = scan_counts(eqn)
            inside = open_jaxpr(part)
            found = origins(inside, [object() for _ in inside.invars])
            whole = id(eqn)
            outputs[carried:] = [(whole, value) for value in found[carried:]]
        known.update(zip(eqn.outvars, outputs, strict=True))
    return [*map(read, jaxpr.outvars)]
