"""Compute shardings, and place arrays by them."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import Tracer
from ._dims import logical_dims
from ._explicit import constrain_to
from ._leaves import array_leaves, check_dtypes, is_array, leaf_path
from ._mesh import batch_axes
from ._rule import Decision, NamedLeaf, Rule, apply_rule, check_rule, rule_name
from ._spec import AXES, AnyMesh, check_spec, only


def shardings(tree: PyTree, mesh: AnyMesh, rule: Rule) -> PyTree[NamedSharding | None]:
    """The sharding of each array of a PyTree, as a rule decides.

    **Arguments:**

    - `tree`: any PyTree, of arrays or of `jax.ShapeDtypeStruct`s.
    - `mesh`: from [`eqxshard.make_mesh`][].
    - `rule`: a rule such as [`eqxshard.fsdp`][] makes, or a function of your own.

    **Returns:**

    A PyTree of the same structure: a `NamedSharding` for each array, `None` for every
    other leaf.

    **Raises:**

    `ValueError` if the rule does not claim a leaf; if a spec does not fit its leaf (an
    axis that the mesh does not have or that is used twice, more entries than dims, a dim
    that does not divide); and if the rule names paths or dims that no leaf has.
    `TypeError` if this is not a rule, or it returns something other than a spec.
    """
    check_rule(rule, dict(named_leaves(tree)), mesh)
    return assign_shardings(tree, mesh, rule)


def assign_shardings(
    tree: PyTree, mesh: AnyMesh, rule: Rule
) -> PyTree[NamedSharding | None]:
    """As `shardings`, for a PyTree that may be only a part of what the rule is for."""
    return as_shardings(tree, mesh, decide_leaves(named_leaves(tree), mesh, rule))


def as_shardings(
    tree: PyTree, mesh: AnyMesh, decisions: Iterable[Decision]
) -> PyTree[NamedSharding | None]:
    """The sharding of each array of a PyTree, from the decisions in their order."""
    decided = iter(decisions)
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, next(decided).spec) if is_array(leaf) else None,
        tree,
    )


def decide_leaves(
    leaves: list[tuple[str, NamedLeaf]], mesh: AnyMesh, rule: Rule
) -> list[Decision]:
    """The decision of a rule for each leaf; raise if it does not claim them all."""
    decisions, unclaimed = [], []
    for path, leaf in leaves:
        decision = apply_rule(rule, path, leaf, mesh)
        if decision is None:
            unclaimed.append(f"{path or 'the array'} {leaf.shape}")
        else:
            decisions.append(decision)
    if unclaimed:
        more = f" (nor {len(unclaimed) - 1} more)" if len(unclaimed) > 1 else ""
        name = rule_name(rule)
        raise UsageError(
            f"{name} does not claim {unclaimed[0]}{more}; name it in the rule, or "
            f"replicate everything else with first_match({name}, replicate())."
        )
    return decisions


def named_leaves(tree: PyTree) -> list[tuple[str, NamedLeaf]]:
    """The arrays of a PyTree as rules see them, with their paths."""
    named = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_array(leaf):
            check_dtypes([(leaf_path(path), leaf)])
            # Several rules may ask for the dims, and several times.
            read_dims = cache(partial(logical_dims, tree, path, leaf))
            named.append((leaf_path(path), NamedLeaf(leaf.shape, leaf.dtype, read_dims)))
    return named


def filter_shard(tree: PyTree, shardings: PyTree[Sharding | None]) -> PyTree:
    """Place the arrays of a PyTree; leave everything else alone.

    Outside jit the arrays are moved, without waiting. Inside jit they are constrained
    ([`jax.lax.with_sharding_constraint`][], or on Explicit axes `jax.sharding.reshard`).
    NumPy arrays become JAX arrays.

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
    `TypeError` if `shardings` holds anything else, or an array is of a dtype that JAX
    does not have.

    !!! Example

        ```python
        model = eqxshard.filter_shard(model, eqxshard.shardings(model, mesh, rule))
        ```
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in flat]
    arrays = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    chosen: dict[int, Sharding] = {}
    for i, sharding in zip(arrays, broadcast_prefix(shardings, tree), strict=True):
        path, leaf = flat[i]
        check_dtypes([(leaf_path(path), leaf)])
        if isinstance(sharding, NamedSharding):
            check_spec(leaf_path(path), leaf.shape, sharding.spec, sharding.mesh)
        if sharding is not None and eqx.is_array(leaf):
            chosen[i] = sharding
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        moved = [constrain_to(leaves[i], sharding) for i, sharding in chosen.items()]
    else:
        moved = jax.device_put([leaves[i] for i in chosen], [*chosen.values()])
    for i, leaf in zip(chosen, moved, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def from_host(
    shape: tuple[int, ...], sharding: Sharding, part: Callable[[Any], np.ndarray]
) -> Array:
    """Copy an array from the host, which may have only parts of it, to the devices.

    The copy is intended, so it is allowed under `jax.transfer_guard`. (`device_put` takes
    twice as long.)

    **Arguments:**

    - `shape`, `sharding`: those of the array.
    - `part`: returns the part of the array at an index.
    """
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, part)


def broadcast_prefix(
    shardings: PyTree[Sharding | None], tree: PyTree
) -> list[Sharding | None]:
    """The sharding of each array of `tree`, in order, from a prefix of `tree`."""
    entries: list[Sharding | None] = []

    def repeat(sharding: Any, part: PyTree) -> None:
        if not isinstance(sharding, Sharding | None):
            raise UsageTypeError(
                f"{sharding!r} is a {type(sharding).__name__}, not a sharding; write "
                "jax.NamedSharding(mesh, spec), or None to leave arrays where they are."
            )
        entries.extend([sharding] * sum(map(is_array, jax.tree.leaves(part))))

    try:
        jax.tree.map(
            repeat, shardings, tree, is_leaf=lambda x: x is None or isinstance(x, Sharding)
        )
    except ValueError as error:
        raise UsageError(
            "the shardings are not a prefix of the PyTree that they are for; give one "
            f"sharding for all of it, or what eqxshard.shardings made of it. ({error})"
        ) from None
    return entries


def constrain(x: PyTree, spec: PartitionSpec) -> PyTree:
    """Fix how an activation is split, inside a model.

    Inside a step of [`eqxshard.make_train_step`][] the mesh is the step's. Without a
    mesh, and in the per-device code of [`jax.shard_map`][], this does nothing, so the
    model itself needs no mesh. Axes of [`eqxshard.make_mesh`][] that the mesh does not have
    are left out of the spec; so are the axes along which code is per device already.

    **Arguments:**

    - `x`: a PyTree of arrays.
    - `spec`: the mesh axes along their first dims; further dims are not split. Dims that
        are `P.UNCONSTRAINED` are left to the compiler. Under `jax.vmap` the dims are those
        of one example.

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
    if len(mesh.manual_axes) == len(mesh.axis_names):
        return x
    left_out = {*mesh.manual_axes, *({*AXES} - {*mesh.axis_names})}
    spec = PartitionSpec(*(only(entry, lambda x: x not in left_out) for entry in spec))
    for path, leaf in array_leaves(x):
        check_spec(path, leaf.shape, spec, mesh)
    return jax.tree.map(lambda x: constrain_to(x, spec) if is_array(x) else x, x)


def compute_sharding(storage: NamedSharding) -> NamedSharding:
    """The sharding of a parameter while it is used: not split over the axes of the batch.

    A weight split over the same axis as the batch must be gathered before it meets the
    batch's rows; left to itself, the compiler may split features instead of rows.
    """
    mesh: Any = storage.mesh
    of_batch = batch_axes(mesh)
    entries = [only(entry, lambda axis: axis not in of_batch) for entry in storage.spec]
    return NamedSharding(mesh, PartitionSpec(*entries))
