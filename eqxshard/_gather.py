"""Parameters on their way from where they are stored to where they are used."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray, PyTree

from .rules import axes_of
from .sharding import compute_sharding


class _Stored(NamedTuple):
    """An array where it is stored, and how to bring it from there, whole or in part."""

    array: Array
    storage: NamedSharding
    update: NamedSharding
    dtype: DTypeLike | None


#: What the arrays of the model at hand were gathered from, by their `id`. With the
#: gathered array itself, so that no other gets its `id`.
_SOURCES: contextvars.ContextVar[dict[int, tuple[Array, _Stored]]] = contextvars.ContextVar(
    "eqxshard_sources"
)


@contextlib.contextmanager
def gathered(
    model: PyTree,
    storage: PyTree[NamedSharding | None],
    update: PyTree[NamedSharding | None],
    dtype: DTypeLike | None = None,
) -> Iterator[PyTree]:
    """A model as it is used: each array gathered along the axes that split the batch.

    Floating-point arrays are cast to `dtype` before. Inside of this, [`scan_layers`][
    eqxshard.scan_layers] gathers the arrays of stacked layers one layer at a time, and
    the compiler drops what was gathered here and is not used.
    """
    sources = {}

    def one(leaf: Any, storage: NamedSharding | None, update: NamedSharding | None) -> Any:
        if storage is None:
            return leaf
        stored = _Stored(leaf, storage, update or storage, dtype)
        out = _gather(stored)
        sources[id(out)] = (out, stored)
        return out

    is_leaf = lambda x: x is None  # noqa: E731
    out = jax.tree.map(one, model, storage, update, is_leaf=is_leaf)
    token = _SOURCES.set(sources)
    try:
        yield out
    finally:
        _SOURCES.reset(token)


def _gather(stored: _Stored) -> Array:
    """Bring an array to where it is used.

    Its gradient takes the way back in one go: cast, summed over the batch's axes and
    left where the array is updated, which is a reduce-scatter.
    """

    def there(array: Array) -> Array:
        if stored.dtype is not None and jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(stored.dtype)
        return jax.lax.with_sharding_constraint(array, compute_sharding(stored.storage))

    if not jnp.issubdtype(stored.array.dtype, jnp.inexact):
        return there(stored.array)

    def back(_: None, grad: Array) -> tuple[Array]:
        grad = grad.astype(stored.array.dtype)
        return (jax.lax.with_sharding_constraint(grad, stored.update),)

    gather = jax.custom_vjp(there)
    gather.defvjp(lambda array: (there(array), None), back)
    return gather(stored.array)


def scan_layers(
    layers: PyTree,
    x: PyTree,
    *args: Any,
    key: PRNGKeyArray | None = None,
    remat: bool | Callable[..., bool] = True,
) -> PyTree:
    """Apply stacked layers one after the other: one layer is compiled, whatever the depth.

    Under FSDP the parameters of one layer at a time are gathered, and let go of before
    the next; in the backward pass they are gathered again. (Without this, all layers are
    gathered at the beginning of a step and kept to its end.) That holds for the arrays of
    the step's model as the loss function gets them, if their dim of layers is not split;
    others are gathered all at once.

    **Arguments:**

    - `layers`: a module whose arrays have a leading dim of layers, as made by
        `eqx.filter_vmap(make_layer)(keys)`.
    - `x`: the input of the first layer. Each layer returns the input of the next, of the
        same shapes and types.
    - `args`: more arguments, the same for all layers.
    - `key`: a random key, of which each layer gets its own as `key=`.
    - `remat`: whether to compute the inside of each layer again in the backward pass
        rather than to keep it; or a policy of [`jax.checkpoint`][], such as
        `jax.checkpoint_policies.dots_saveable`, that says what to keep.

    **Returns:**

    The output of the last layer.

    **Raises:**

    `ValueError` if the arrays do not have the same leading dim.

    !!! Example

        ```python
        class Model(eqx.Module):
            blocks: Block

            def __init__(self, depth, *, key):
                self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, depth))

            def __call__(self, x, key=None):
                return eqxshard.scan_layers(self.blocks, x, key=key)
        ```
    """
    arrays, static = eqx.partition(layers, eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    depths = {leaf.shape[:1] for leaf in leaves}
    if len(depths) != 1 or () in depths:
        raise ValueError(
            f"the arrays of the layers have the shapes {[leaf.shape for leaf in leaves]}, "
            "not all with the same leading dim; stack the layers with "
            "eqx.filter_vmap(make_layer)(keys)."
        )
    ((depth,),) = depths
    stored = [_stored_by_layer(leaf) for leaf in leaves]
    keys = None if key is None else jax.random.split(key, depth)

    def body(x: PyTree, layer: tuple[list[Array], Array | None]) -> tuple[PyTree, None]:
        parts, key = layer
        parts = [
            part if one is None else _gather(_layer_of(one, part))
            for part, one in zip(parts, stored, strict=True)
        ]
        module = eqx.combine(jax.tree.unflatten(treedef, parts), static)
        return (module(x, *args) if key is None else module(x, *args, key=key)), None

    if remat:
        policy = None if remat is True else remat
        # The scan keeps XLA from undoing it.
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    xs = [leaf if one is None else one.array for leaf, one in zip(leaves, stored)]
    return jax.lax.scan(body, x, (xs, keys))[0]


def _stored_by_layer(leaf: Array) -> _Stored | None:
    """Where a gathered array is stored, if each device has its part of every layer."""
    _, stored = _SOURCES.get({}).get(id(leaf), (None, None))
    if stored is None:
        return None
    specs = (stored.storage.spec, stored.update.spec)
    return None if any(axes_of(spec[0]) for spec in specs if spec) else stored


def _layer_of(stored: _Stored, part: Array) -> _Stored:
    """One layer of a stacked array."""

    def place(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))

    return _Stored(part, place(stored.storage), place(stored.update), stored.dtype)
