"""Where the arrays of PyTrees lie: as rules say, or as they are told."""

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from ._dims import logical_dims
from .mesh import BATCH_AXES
from .rules import NamedLeaf, Rule, axes_of, check_rule, check_spec, decide


def shardings(tree: PyTree, mesh: Mesh, rule: Rule) -> PyTree[NamedSharding | None]:
    """Where each array of a PyTree lies, as a rule decides.

    **Arguments:**

    - `tree`: any PyTree, of arrays or of `jax.ShapeDtypeStruct`s.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: from [`eqxshard.fsdp`][] and its like, or a function of your own. A leaf
        that it does not claim is replicated.

    **Returns:**

    A PyTree of the same structure: a `NamedSharding` for each array, `None` for every
    other leaf.

    **Raises:**

    `ValueError` if a spec does not fit its leaf: an axis that the mesh does not have or
    that is used twice, more dims than the leaf has, or a dim that does not divide; and
    if a rule names paths or dims that no leaf has. `TypeError` if a rule answers with
    something else than a spec.
    """
    leaves = named_leaves(tree)
    check_rule(rule, {path: leaf for path, leaf in leaves if leaf is not None}, mesh)
    return place(tree, mesh, rule)


def place(tree: PyTree, mesh: Mesh, rule: Rule) -> PyTree[NamedSharding | None]:
    """As `shardings`, for what may be a part of the PyTree that the rule is for."""
    places = [
        None if leaf is None else NamedSharding(mesh, decide(rule, path, leaf, mesh).spec)
        for path, leaf in named_leaves(tree)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), places)


def named_leaves(tree: PyTree) -> list[tuple[str, NamedLeaf | None]]:
    """The path of each leaf, and what a rule is told of it: nothing, if it is no array."""
    named: list[tuple[str, NamedLeaf | None]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        described = None
        if is_array(leaf):
            # Several rules may ask for the dims, and several times.
            read_dims = cache(partial(logical_dims, tree, path))
            described = NamedLeaf(leaf.shape, leaf.dtype, read_dims)
        named.append((leaf_path(path), described))
    return named


def filter_shard(tree: PyTree, shardings: PyTree[Sharding | None]) -> PyTree:
    """Place the arrays of a PyTree; leave everything else alone.

    Outside jit the arrays are moved there, without waiting. Inside jit they are
    constrained to lie there ([`jax.lax.with_sharding_constraint`][]). NumPy arrays become
    JAX arrays.

    **Arguments:**

    - `tree`: any PyTree.
    - `shardings`: one `jax.sharding.Sharding` for all its arrays, or a PyTree of them
        that is a prefix of `tree`, such as [`eqxshard.shardings`][] returns. Arrays under
        a `None` are left where they are.

    **Returns:**

    A PyTree like `tree`.

    **Raises:**

    `ValueError` if an array does not divide as its sharding asks (JAX itself, inside
    jit, would quietly replicate it), or `shardings` is not a prefix of `tree`;
    `TypeError` if it holds something else.

    !!! Example

        ```python
        model = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, rule))
        ```
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in flat]
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    chosen: dict[int, Sharding] = {}
    for i, place in zip(arrays, spread(shardings, tree), strict=True):
        path, leaf = flat[i]
        if isinstance(place, NamedSharding):
            check_spec(leaf_path(path), leaf.shape, place.spec, place.mesh)
        if place is not None and eqx.is_array(leaf):
            chosen[i] = place
    inside = any(isinstance(leaf, Tracer) for leaf in leaves)
    move = jax.lax.with_sharding_constraint if inside else jax.device_put
    moved = move([leaves[i] for i in chosen], [*chosen.values()])
    for i, leaf in zip(chosen, moved, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def spread(shardings: PyTree[Sharding | None], tree: PyTree) -> list[Sharding | None]:
    """One entry for each array of `tree`, in order, from a prefix of it."""
    entries: list[Sharding | None] = []

    def over(sharding: Any, part: PyTree) -> None:
        if not isinstance(sharding, Sharding | None):
            raise TypeError(
                f"{sharding!r} is a {type(sharding).__name__}, not a sharding; write "
                "jax.NamedSharding(mesh, spec), or None to leave arrays where they are."
            )
        entries.extend([sharding] * sum(map(is_array, jax.tree.leaves(part))))

    try:
        jax.tree.map(
            over, shardings, tree, is_leaf=lambda x: x is None or isinstance(x, Sharding)
        )
    except ValueError as error:
        raise ValueError(
            "the shardings are not a prefix of the PyTree that they are for; give one for "
            f"all of it, or what eqxshard.shardings made of it. ({error})"
        ) from None
    return entries


def constrain(x: PyTree, spec: PartitionSpec) -> PyTree:
    """Say where an activation lies, inside a model.

    A model that runs inside a step of [`eqxshard.make_train_step`][] is constrained on
    that step's mesh. Where there is no mesh, and in the per-device code of
    [`jax.shard_map`][], this does nothing: the model needs no mesh.

    **Arguments:**

    - `x`: a PyTree of arrays.
    - `spec`: the mesh axes along their first dims; the other dims are whole, except
        those that are `P.UNCONSTRAINED`. Under `jax.vmap` the dims are those of one
        example.

    **Returns:**

    `x`, constrained.

    **Raises:**

    `ValueError` if the spec does not fit an array, as for [`eqxshard.shardings`][].

    !!! Example

        ```python
        hidden = eqxshard.constrain(jax.nn.gelu(self.up(x)), P("tensor"))
        ```
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Auto not in mesh.axis_types:
        return x
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        if is_array(leaf):
            check_spec(leaf_path(path), leaf.shape, spec, mesh)
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, spec) if is_array(x) else x, x
    )


def compute_sharding(storage: NamedSharding) -> NamedSharding:
    """Where a parameter lies while it is used: whole along the axes that split the batch.

    A weight split over the same axis as the batch must be gathered before a batch's
    rows meet it; left to itself the compiler may split features instead of rows.
    """

    def used(entry: Any) -> tuple[str, ...] | None:
        return tuple(axis for axis in axes_of(entry) if axis not in BATCH_AXES) or None

    return NamedSharding(storage.mesh, PartitionSpec(*map(used, storage.spec)))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or stands for one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Whether an array, or what stands for one, is of random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_path(path: tuple[Any, ...], root: str = "") -> str:
    """The path of a leaf, below a root, as rules and errors write it: `layers.0.weight`."""
    below = jax.tree_util.keystr(path, simple=True, separator=".")
    return ".".join(filter(None, (root, below)))
