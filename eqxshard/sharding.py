"""Rules: from a leaf of a PyTree to the part of the mesh that holds it."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from .mesh import BATCH_AXES

#: A rule maps `(path, leaf, mesh)` to a `PartitionSpec`, or to `None`: "not mine".
Rule = Callable[[str, jax.ShapeDtypeStruct, Mesh], PartitionSpec | None]


class Decision(NamedTuple):
    """What a rule said of a leaf: its spec, which rule it was, and why."""

    spec: PartitionSpec
    rule: str
    note: str = ""


@dataclass(frozen=True)
class _Rule:
    """One of our own rules: called like any other, and able to say why."""

    name: str
    decide: Callable[[str, jax.ShapeDtypeStruct, Mesh], Decision | None]

    def __call__(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh
    ) -> PartitionSpec | None:
        decision = self.decide(path, leaf, mesh)
        return None if decision is None else decision.spec

    def __repr__(self) -> str:
        return self.name


def replicate() -> Rule:
    """Every device holds the whole leaf: plain data parallelism.

    **Returns:**

    A rule that claims every leaf with `P()`.
    """
    return _Rule("replicate()", lambda *_: Decision(PartitionSpec(), "replicate()"))


def fsdp(min_size: int = 2**18, axis: str = "fsdp") -> Rule:
    """Split each large leaf over one mesh axis: fully sharded data parallelism.

    The largest dim that divides by the size of the axis is split, the first of equals.
    A leaf with no such dim stays whole, and [`eqxshard.explain`][] says so. Between
    steps each device holds its part of parameters, gradients and optimizer state (ZeRO
    stage 3, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); the step gathers
    the parameters for the computation.

    **Arguments:**

    - `min_size`: leaves of fewer elements than this stay whole: gathering them would
        cost more than they take.
    - `axis`: the mesh axis to split over.

    **Returns:**

    A rule that claims every leaf.
    """
    name = f"fsdp({axis!r})" if axis != "fsdp" else "fsdp()"

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
        _check_axis(axis, mesh, name)
        size = mesh.shape[axis]
        count = math.prod(leaf.shape)
        if count < min_size:
            return Decision(
                PartitionSpec(), name, f"{count:,} elements, below min_size={min_size:,}"
            )
        dims = [d for d, n in enumerate(leaf.shape) if n and n % size == 0]
        if not dims:
            return Decision(
                PartitionSpec(),
                name,
                f"whole: no dim of {leaf.shape} divides by {axis}={size}",
            )
        dim = max(dims, key=lambda d: leaf.shape[d])
        return Decision(PartitionSpec(*[None] * dim, axis), name)

    return _Rule(name, decide)


def by_path(specs: Mapping[str, PartitionSpec]) -> Rule:
    r"""Name leaves by their path, such as `layers.0.weight`.

    **Arguments:**

    - `specs`: a mapping from regular expressions, searched in the path (anchor them with
        `^` and `$` where that matters), to the `PartitionSpec` of the leaves that match.
        The first match decides.

    **Returns:**

    A rule that claims the leaves that match.

    **Raises:**

    `ValueError` if an expression is not valid.

    !!! Example

        ```python
        rule = eqxshard.by_path({r"attention.*weight$": P("tensor", None)})
        ```
    """
    for pattern in specs:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"by_path: {pattern!r} is not a regular expression ({error}); escape its "
                "special characters with a backslash."
            ) from None

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        for pattern, spec in specs.items():
            if re.search(pattern, path):
                return Decision(spec, f"by_path({pattern!r})")
        return None

    return _Rule(f"by_path({', '.join(map(repr, specs))})", decide)


def first_match(*rules: Rule) -> Rule:
    """Ask rules in turn; the first that claims a leaf decides.

    **Arguments:**

    - `rules`: the rules, most particular first.

    **Returns:**

    A rule that claims what any of them claims.

    !!! Example

        ```python
        rule = eqxshard.first_match(eqxshard.by_path({"embed": P()}), eqxshard.fsdp())
        ```
    """

    def decide(path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        decisions = (_ask(rule, path, leaf, mesh) for rule in rules)
        return next((d for d in decisions if d is not None), None)

    return _Rule(f"first_match({', '.join(map(_name, rules))})", decide)


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
    that is used twice, more dims than the leaf has, or a dim that does not divide;
    `TypeError` if a rule answers with something else than a spec.
    """

    def place(path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, decide(rule, path, leaf, mesh).spec)

    return _map_arrays(place, tree)


def decide(rule: Rule, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision:
    """Ask a rule for a leaf, and check that the answer fits the leaf and the mesh."""
    decision = _ask(rule, path, leaf, mesh)
    if decision is None:
        return Decision(PartitionSpec(), "no rule", "claimed by no rule: replicated")
    if not isinstance(decision.spec, PartitionSpec):
        raise TypeError(
            f"the rule {decision.rule} answers {decision.spec!r} for "
            f"{path or 'the array'}; answer with a jax.P, or None for a leaf that is not "
            "the rule's."
        )
    _check_spec(path, leaf.shape, decision.spec, mesh)
    return decision


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
            _check_spec(leaf_path(path), leaf.shape, place.spec, place.mesh)
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

    def one(path: str, leaf: jax.ShapeDtypeStruct) -> None:
        _check_spec(path, leaf.shape, spec, mesh)

    _map_arrays(one, x)
    return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, spec), x)


def compute_sharding(storage: NamedSharding) -> NamedSharding:
    """Where a parameter lies while it is used: whole along the axes that split the batch.

    A weight split over the same axis as the batch must be gathered before a batch's
    rows meet it; left to itself the compiler may split features instead of rows.
    """

    def used(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(axes, tuple):
            return tuple(axis for axis in axes if axis not in BATCH_AXES) or None
        return None if axes in BATCH_AXES else axes

    return NamedSharding(storage.mesh, PartitionSpec(*map(used, storage.spec)))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or stands for one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def leaf_path(path: tuple[Any, ...]) -> str:
    """The path of a leaf as rules and errors write it: `layers.0.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _map_arrays(fn: Callable[[str, jax.ShapeDtypeStruct], Any], tree: PyTree) -> PyTree:
    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array(leaf):
            return None
        return fn(leaf_path(path), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    return jax.tree_util.tree_map_with_path(one, tree)


def _ask(rule: Rule, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
    if isinstance(rule, _Rule):
        return rule.decide(path, leaf, mesh)
    if any(rule is maker for maker in (replicate, fsdp, by_path, first_match)):
        raise TypeError(
            f"{_name(rule)} makes a rule and is not one; call it, as {_name(rule)}()."
        )
    spec = rule(path, leaf, mesh)
    return None if spec is None else Decision(spec, _name(rule))


def _name(rule: Rule) -> str:
    return getattr(rule, "__name__", repr(rule))


def _check_axis(axis: str, mesh: Mesh | jax.sharding.AbstractMesh, where: str) -> None:
    if axis not in mesh.shape:
        near = difflib.get_close_matches(axis, mesh.axis_names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{where} names the axis {axis!r}, which the mesh does not have; {hint}"
            f"its axes are {', '.join(map(str, mesh.axis_names))}."
        )


def _check_spec(
    path: str,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    mesh: Mesh | jax.sharding.AbstractMesh,
) -> None:
    where = f"{path or 'the array'} {shape}: {spec}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{where} has {len(spec)} entries and the array {len(shape)} dims; give at "
            "most one entry per dim."
        )
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        if entry is None or entry is PartitionSpec.UNCONSTRAINED:
            continue
        axes = entry if isinstance(entry, tuple) else (entry,)
        for axis in axes:
            _check_axis(axis, mesh, where)
            if axis in seen:
                raise ValueError(
                    f"{where} uses the axis {axis!r} twice; an axis can split one dim only."
                )
            seen.add(axis)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % parts:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise ValueError(
                f"{where} splits dim {dim} of size {shape[dim]} over {sizes}, which does "
                f"not divide it; choose a dim that is a multiple of {parts}, or leave this "
                "one whole."
            )
