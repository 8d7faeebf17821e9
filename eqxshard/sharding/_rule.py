"""The protocol of rules, and how one is applied to a leaf."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._errors import UsageError, UsageTypeError
from ._spec import AnyMesh, axes_of, check_spec, spec_on

#: A rule maps `(path, leaf, mesh)` to a `PartitionSpec`, or to `None`: "not mine".
#: The mesh may be a `jax.sharding.AbstractMesh`, which has no devices.
Rule = Callable[[str, jax.ShapeDtypeStruct, Mesh], PartitionSpec | None]

#: The arrays of a PyTree, by their paths.
Leaves = Mapping[str, jax.ShapeDtypeStruct]


class NamedLeaf(jax.ShapeDtypeStruct):
    """An array as rules see it: its shape and dtype, and where known

    - `dims`: the names of its dims, from the type annotation of its field;
    - `sharding`: how the earlier rules of an [`eqxshard.combine`][] split it.
    """

    __slots__ = ("_read_dims",)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        read_dims: Callable[[], tuple[str | None, ...] | None],
        sharding: NamedSharding | None = None,
    ):
        super().__init__(shape, dtype, sharding=sharding)
        self._read_dims = read_dims

    @property
    def dims(self) -> tuple[str | None, ...] | None:
        """One name per dim, `None` for a dim without one; `None` if nothing is annotated.

        Read on first use: an annotation that cannot be resolved is an error only for
        rules that need it.
        """
        return self._read_dims()


class Decision(NamedTuple):
    """A rule's answer for one leaf: the spec, the rule that chose it, and why.

    `undivided` is true if the rule would have split the leaf, but no dim divides.
    """

    spec: PartitionSpec
    rule: str
    note: str = ""
    undivided: bool = False


class AbstractRule(abc.ABC):
    """A rule of this library: called like any other, and able to explain itself."""

    @property
    def label(self) -> str:
        """A short name for tables and errors; `repr` says every argument."""
        return f"{type(self).__name__}()"

    @abc.abstractmethod
    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """The decision for one leaf, or `None`: not mine."""

    @abc.abstractmethod
    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """Raise `ValueError` if the rule names an axis, path or dim that does not exist."""

    def map_inside(self, fn: Callable[[Rule], Rule]) -> Rule:
        """This rule with a function applied to each rule that it asks; most ask none."""
        return self

    def __call__(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> PartitionSpec | None:
        decision = self.decide(path, leaf, mesh)
        return None if decision is None else decision.spec


def apply_rule(
    rule: Rule, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
) -> Decision | None:
    """Ask any rule about a leaf, and check that the answer is a spec that fits."""
    if isinstance(rule, AbstractRule):
        decision = rule.decide(path, leaf, mesh)
    else:
        spec = rule(path, leaf, mesh)  # pyright: ignore[reportArgumentType]
        decision = None if spec is None else Decision(spec, rule_name(rule))
    if decision is not None:
        _check_decision(decision, path, leaf, mesh)
        if 0 in leaf.shape:
            # JAX 0.10 replicates the empty arrays that it computes.
            return decision._replace(spec=PartitionSpec(), note="empty")
        return decision._replace(spec=spec_on(decision.spec, mesh))
    return decision


def map_rules_inside(rule: Rule, fn: Callable[[Rule], Rule]) -> Rule:
    """Any rule with a function applied to the rules inside; those of users have none."""
    return rule.map_inside(fn) if isinstance(rule, AbstractRule) else rule


def check_rule(rule: Rule, leaves: Leaves, mesh: AnyMesh) -> None:
    """Raise unless this is a rule, and the leaves and the mesh have all that it names."""
    if isinstance(rule, AbstractRule):
        if leaves:
            rule.check(leaves, mesh)
        return
    if isinstance(rule, type):
        raise UsageTypeError(
            f"rule={rule.__name__} is a class, not a rule; call it: {rule.__name__}()."
        )
    if not callable(rule):
        raise UsageTypeError(
            f"rule={rule!r} is not a rule; give one such as eqxshard.fsdp() or "
            "eqxshard.by_path({...: P(...)}), or a function of (path, leaf, mesh) that "
            "returns a jax.P or None."
        )


def rule_name(rule: Rule) -> str:
    """The name of a rule in errors and in [`eqxshard.explain`][]."""
    if isinstance(rule, AbstractRule):
        return rule.label
    return getattr(rule, "__name__", None) or repr(rule)


def leaf_dims(leaf: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
    """The names of a leaf's dims; empty if nothing is annotated."""
    return (leaf.dims or ()) if isinstance(leaf, NamedLeaf) else ()


def axes_by_dim(leaf: jax.ShapeDtypeStruct) -> list[tuple[str, ...]]:
    """For each dim of a leaf, the axes that already split it."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    entries = [axes_of(entry) for entry in spec]
    return entries + [()] * (len(leaf.shape) - len(entries))


def _check_decision(
    decision: Decision, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
) -> None:
    if not isinstance(decision.spec, PartitionSpec):
        raise UsageTypeError(
            f"the rule {decision.rule} returned {decision.spec!r} for "
            f"{path or 'the array'}; return a jax.P, or None to leave the leaf to other "
            "rules."
        )
    if PartitionSpec.UNCONSTRAINED in tuple(decision.spec):
        raise UsageError(
            f"the rule {decision.rule} leaves a dim of {path or 'the array'} "
            "UNCONSTRAINED, which only activations can be; write None or an axis."
        )
    check_spec(path, leaf.shape, decision.spec, mesh)
