"""The arrays of a PyTree, by their paths."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a JAX array or a `jax.ShapeDtypeStruct`."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Whether an array (or its `jax.ShapeDtypeStruct`) holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a floating-point or complex array, which can be trained."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_weak_as(array: Array, like: Any) -> Array:
    """An array, of a weak type if another is: it gives way as numbers of Python do."""
    if not getattr(like, "weak_type", False) or array.weak_type:
        return array
    # The public functions only make weak types of Python's numbers.
    return jax.lax.convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )


def leaf_path(path: tuple[Any, ...], root: str = "") -> str:
    """The path of a leaf as rules and errors write it: `layers.0.weight`."""
    below = jax.tree_util.keystr(path, simple=True, separator=".")
    return ".".join(filter(None, (root, below)))


def array_leaves(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """The path of each array of a PyTree, and the array; none may be of objects or text."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = [(leaf_path(path, root), leaf) for path, leaf in leaves if is_array(leaf)]
    check_dtypes(found)
    return found


def check_dtypes(leaves: Iterable[tuple[str, Any]]) -> None:
    """Refuse NumPy arrays of types that JAX does not have, such as of objects."""
    for path, leaf in leaves:
        if isinstance(leaf, np.ndarray | np.generic):
            try:
                jax.typeof(leaf)
            except TypeError:
                raise TypeError(
                    f"{path or 'the leaf'} is a NumPy array of dtype {leaf.dtype}, which "
                    "JAX does not have; make it an array of numbers, or keep it as "
                    "something hashable, such as a tuple, in a static field."
                ) from None


def format_array(leaf: Any) -> str:
    """The dtype and shape of an array: `float32[8,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def stacked_depth(layers: PyTree) -> int:
    """The leading dim of a module of stacked layers, which all its arrays share."""
    shapes = {path: leaf.shape for path, leaf in array_leaves(layers)}
    depths = {shape[:1] for shape in shapes.values()}
    if len(depths) != 1 or () in depths:
        raise ValueError(
            f"the arrays of the layers have the shapes {shapes}, without a common leading "
            "dim; stack the layers with eqx.filter_vmap(make_layer)(keys)."
        )
    return depths.pop()[0]
