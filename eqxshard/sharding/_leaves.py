"""The arrays of a PyTree, by their paths, and checks that JAX can hold them."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageTypeError

#: For errors about batches of one graph, whose nodes and edges differ in number.
GRAPHS = (
    "for graphs, such as those of jraph: pad each to the same numbers of nodes and edges, "
    "stack them, and use jax.vmap in the loss"
)


def is_array(leaf: Any) -> bool:
    """True for a JAX array, a NumPy array or a `jax.ShapeDtypeStruct`."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """True if an array (or its `jax.ShapeDtypeStruct`) holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_inexact(leaf: Any) -> bool:
    """True for a floating-point or complex array, which can be trained."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_weak_as(array: Array, like: Any) -> Array:
    """The array, with a weak type if `like` has one: it promotes as Python's numbers do."""
    if not getattr(like, "weak_type", False) or array.weak_type:
        return array
    # The public functions make weak types from Python's numbers only.
    return jax.lax.convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )


def leaf_path(path: tuple[Any, ...], root: str = "") -> str:
    """The path of a leaf as rules and errors write it: `layers.0.weight`."""
    below = jax.tree_util.keystr(path, simple=True, separator=".")
    return ".".join(filter(None, (root, below)))


def array_leaves(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """The path of each array of a PyTree, and the array; refuse objects and text."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = [(leaf_path(path, root), leaf) for path, leaf in leaves if is_array(leaf)]
    check_dtypes(found)
    return found


def check_dtypes(
    leaves: Iterable[tuple[str, Any]],
    remedy: str = "make it an array of numbers, or keep it as something hashable, such as "
    "a tuple, in a static field",
) -> None:
    """Refuse NumPy arrays of dtypes that JAX does not have, such as `object`.

    **Arguments:**

    - `leaves`: arrays and other values, each after its name.
    - `remedy`: what to do about arrays that do not hold numbers.

    **Raises:**

    `TypeError` naming the first of them, or a masked array.
    """
    for name, leaf in leaves:
        check_not_masked(name, leaf)
        if isinstance(leaf, np.ndarray | np.generic) and not _is_known(leaf.dtype):
            raise UsageTypeError(
                f"{name or 'the leaf'} is a NumPy array of dtype {leaf.dtype}, which JAX "
                f"does not have; {_conversion(leaf.dtype) or remedy}."
            )


def check_not_masked(name: str, leaf: Any) -> None:
    """Refuse masked arrays, before NumPy silently drops their masks."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise UsageTypeError(
            f"{name or 'the leaf'} is a masked array, and JAX has no masks; fill it, "
            "with x.filled(0), or leave the rows out by their weight."
        )


@functools.cache
def _is_known(dtype: np.dtype) -> bool:
    try:
        jax.typeof(np.empty((), dtype))
    except TypeError:
        return False
    return True


def _conversion(dtype: np.dtype) -> str | None:
    """How to convert an array of numbers to a dtype that JAX has; `None` for no numbers."""
    if dtype.type is np.longdouble:
        return "convert it with x.astype(np.float64)"
    if dtype.type is np.clongdouble:
        return "convert it with x.astype(np.complex128)"
    if dtype.names:
        return f"make an array of each of its fields, such as x[{dtype.names[0]!r}]"
    if dtype.kind in "iufc":
        # Files in IDX, FITS and netCDF have the most significant byte first.
        return 'convert it with x.astype(x.dtype.newbyteorder("="))'
    return None


def check_integers(
    arrays: Mapping[str, np.ndarray], remedy: str = "use a transform that makes them fit"
) -> None:
    """Raise `ValueError` where JAX, which has 32 bits by default, would wrap integers."""
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
            continue
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype != array.dtype:
            low, high = int(array.min(initial=0)), int(array.max(initial=0))
            if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
                raise UsageError(
                    f"{name!r} has integers from {low} to {high}, which do not fit JAX's "
                    f"{dtype}; {remedy}, or turn jax_enable_x64 on."
                )


def format_array(leaf: Any) -> str:
    """The dtype and shape of an array: `float32[8,4]`."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def stacked_depth(layers: PyTree) -> int:
    """The number of layers in a module of stacked layers: the dim that its arrays share."""
    shapes = {path: leaf.shape for path, leaf in array_leaves(layers)}
    depths = {shape[:1] for shape in shapes.values()}
    if len(depths) != 1 or () in depths:
        raise UsageError(
            f"the arrays of the layers have the shapes {shapes}, without a common leading "
            "dim; stack the layers with eqx.filter_vmap(make_layer)(keys)."
        )
    return depths.pop()[0]
