"""Parameters on their way from where they are stored to where they are used, and back."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from ..sharding._explicit import (
    computing_on_auto,
    constrain_to,
    replicated_on,
    to_auto,
    to_explicit,
)
from ..sharding._leaves import leaf_path
from ..sharding._placement import compute_sharding
from ._precision import Precision, cast
from .rewrite._tables import mark_gradient


class Stored(NamedTuple):
    """A stored array, and how to gather it for use.

    - `array`: the array as it is stored.
    - `storage`: its sharding.
    - `update`: the sharding of its gradient.
    - `dtype`: the type to compute in, if it is another.
    - `is_passed_on`: whether it had been gathered when `jax.jit` or its like passed it on.
    """

    array: Array
    storage: NamedSharding
    update: NamedSharding
    dtype: DTypeLike | None
    is_passed_on: bool = False

    def gather(self) -> Array:
        """The array as it is used: cast, and whole along the axes that split the batch.

        Its gradient goes back in one go: cast, summed over the batch's axes and left
        where the array is updated, which is a reduce-scatter.
        """
        used = compute_sharding(self.storage)
        dtypes = self.array.dtype, self.dtype
        gather = _gather_function(self.storage, self.update, *dtypes, self.is_passed_on)
        with computing_on_auto(used.mesh):
            array = gather(to_auto(self.array))
        return to_explicit(array, used)


def _gather_function(
    storage: NamedSharding,
    update: NamedSharding,
    dtype: Any,
    compute: DTypeLike | None,
    is_passed_on: bool,
) -> Callable[[Array], Array]:
    """A function that gathers arrays of a dtype, and casts them to the one to compute in.

    It closes over no array: JAX's caches keep functions.
    """
    used = compute_sharding(storage)

    def for_use(array: Array) -> Array:
        if compute is not None and jnp.issubdtype(dtype, jnp.floating):
            # Left to itself, the compiler may gather first: twice the bytes.
            array = array.astype(compute)
            array = constrain_to(array, storage)
        return constrain_to(array, used)

    def back(_: None, grad: Array) -> tuple[Array]:
        grad = constrain_to(mark_gradient(grad), update)
        return (constrain_to(grad.astype(dtype), update),)

    if is_passed_on:
        # Its gradient goes the same way back, and is cast and marked further out. Without
        # rules of its own, so that it can also be differentiated forward.
        return lambda array: constrain_to(constrain_to(array, storage), used)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return for_use
    gather = jax.custom_vjp(for_use)
    gather.defvjp(lambda array: (for_use(array), None), back)
    return gather


#: The arrays of the step's model by `id`: each as it is used (held, so that its id stays
#: its own) and as it is stored. `None` outside of a step.
_InUse = Mapping[int, tuple[Array, Stored]]
_IN_USE: contextvars.ContextVar[_InUse | None] = contextvars.ContextVar(
    "eqxshard_in_use", default=None
)


@contextlib.contextmanager
def gathered(
    model: PyTree,
    storage: PyTree[NamedSharding | None],
    update: PyTree[NamedSharding | None],
    mesh: Mesh,
    precision: Precision | None = None,
) -> Iterator[PyTree]:
    """A model as it is used: each array gathered along the axes that split the batch.

    It is the entry `model` of a dict, beside what else a step is given.

    Meanwhile [`scan_layers`][eqxshard.scan_layers] gathers the arrays of stacked layers
    one layer at a time, and the compiler drops the arrays gathered here that are not used.
    """
    pairs: list[tuple[Array, Stored]] = []

    def gather(keys: tuple[Any, ...], leaf: Any, storage: Any, update: Any) -> Any:
        dtype = None if precision is None else precision.compute_type(leaf_path(keys))
        if storage is None:
            return replicated_on(cast(leaf, dtype), mesh)
        # In user code, which may be a loop over layers, on the axes that it sees.
        leaf = to_explicit(leaf, storage)
        stored = Stored(leaf, storage, update or storage, dtype)
        pairs.append((stored.gather(), stored))
        return pairs[-1][0]

    out = jax.tree_util.tree_map_with_path(
        gather, model, storage, update, is_leaf=lambda leaf: leaf is None
    )
    with using(pairs):
        yield out


@contextlib.contextmanager
def using(pairs: Iterable[tuple[Array, Stored]]) -> Iterator[None]:
    """Remember how the gathered arrays are stored."""
    token = _IN_USE.set({id(array): (array, stored) for array, stored in pairs})
    try:
        yield
    finally:
        _IN_USE.reset(token)


def in_use() -> _InUse | None:
    """The arrays of the step's model, by `id`; `None` outside of a step."""
    return _IN_USE.get()
