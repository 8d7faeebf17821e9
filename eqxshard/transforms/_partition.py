"""PyTrees taken apart into arrays and everything else, and put together again."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._errors import UsageTypeError
from ..sharding._leaves import array_leaves, is_array, leaf_path


class _ArrayHere:
    """Marks where an array was taken out of a PyTree."""

    def __repr__(self) -> str:
        return "*"


_HERE = _ArrayHere()


@jax.tree_util.register_static
class Static:
    """The static part of a PyTree: its structure and the leaves that are not arrays.

    It is hashable, and PyTrees with equal static parts can share one compiled function. To
    JAX, it is itself a PyTree without leaves, which a compiled function may return.
    """

    __slots__ = ("_hash", "leaves", "shapes", "treedef")

    def __init__(self, treedef: Any, leaves: tuple[Any, ...], shapes: tuple[Any, ...] = ()):
        self.treedef = treedef
        self.leaves = leaves
        self.shapes = shapes
        self._hash = hash((treedef, leaves, shapes))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Static)
            and self._hash == other._hash
            and self.treedef == other.treedef
            and self.leaves == other.leaves
            and self.shapes == other.shapes
            # 1 == 1.0 == True, and each is a different program.
            and [*map(type, self.leaves)] == [*map(type, other.leaves)]
        )

    @property
    def array_count(self) -> int:
        """The number of arrays that were taken out."""
        return sum(leaf is _HERE for leaf in self.leaves)

    def with_shapes(self, arrays: Sequence[Any]) -> "Static":
        """The same with the shapes and dtypes of the arrays, for code that needs them."""
        shapes = tuple((array.shape, array.dtype) for array in arrays)
        return Static(self.treedef, self.leaves, shapes)

    def combine(self, arrays: Sequence[Any]) -> PyTree:
        """The PyTree again, with `arrays` in the places of its arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is _HERE else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def only(self, values: Sequence[Any]) -> PyTree:
        """The PyTree with `values` in the places of its arrays, `None` in the others."""
        rest = iter(values)
        leaves = [next(rest) if leaf is _HERE else None for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)


def partition(tree: PyTree, name: str = "") -> tuple[list[Any], Static]:
    """The arrays of a PyTree as a flat list, and the rest of it.

    `jax.jit` over the flat list costs a quarter of the time that it takes over the modules.

    **Arguments:**

    - `tree`: any PyTree whose other leaves are hashable.
    - `name`: what errors call the PyTree.

    **Raises:**

    `TypeError` naming a leaf that is neither an array nor hashable.
    """
    leaves, treedef = jax.tree.flatten(tree)
    where = [is_array(leaf) for leaf in leaves]
    arrays = [*itertools.compress(leaves, where)]
    if any(isinstance(array, np.ndarray | np.generic) for array in arrays):
        array_leaves(tree, name)  # This refuses dtypes that JAX does not have.
    static = tuple(_HERE if here else leaf for leaf, here in zip(leaves, where))
    try:
        return arrays, Static(treedef, static)
    except TypeError:
        raise UsageTypeError(_unhashable(tree, name)) from None


def _unhashable(tree: PyTree, name: str) -> str:
    path, leaf = next(
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not (is_array(leaf) or _is_hashable(leaf))
    )
    return (
        f"{leaf_path(path, name)} is a {type(leaf).__name__}, neither an array nor "
        "hashable; make it an array, or something hashable such as a tuple."
    )


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
