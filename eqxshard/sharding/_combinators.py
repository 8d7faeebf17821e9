"""Rules made of other rules."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import AbstractMesh, NamedSharding

from .._errors import UsageError
from ._leaf_rules import zero1
from ._rule import (
    AbstractRule,
    Decision,
    Leaves,
    NamedLeaf,
    Rule,
    apply_rule,
    axes_by_dim,
    check_rule,
    map_rules_inside,
    rule_name,
)
from ._spec import AnyMesh, axes_of, make_spec
from ._text import comma_list

#: JAX's name for host memory that devices can reach.
HOST_MEMORY = "pinned_host"


@dataclass(frozen=True, init=False, repr=False)
class _SeveralRules(AbstractRule):
    """The base of the two rules below, which hold other rules."""

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule):
        for rule in rules:
            if isinstance(rule, offload):
                raise UsageError(
                    f"{rule_name(rule)} is inside another rule, and offload goes around "
                    "all; write offload(combine(...)) or offload(first_match(...))."
                )
        object.__setattr__(self, "rules", rules)

    @property
    def label(self) -> str:
        """The labels of the rules inside."""
        return f"{type(self).__name__}({comma_list(map(rule_name, self.rules))})"

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """Let each rule check itself."""
        for rule in self.rules:
            check_rule(rule, leaves, mesh)

    def map_inside(self, fn: Callable[[Rule], Rule]) -> Rule:
        """A rule of the same kind."""
        return type(self)(*map(fn, self.rules))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({comma_list(map(repr, self.rules))})"


class first_match(_SeveralRules):
    """Ask rules in turn; the first that claims a leaf decides.

    The rule claims what any of them claims.

    **Arguments:**

    - `rules`: the rules, most specific first.

    **Raises:**

    `ValueError` if one of them is an [`eqxshard.offload`][], which goes around all.

    !!! Example

        ```python
        rule = eqxshard.first_match(eqxshard.by_path({"embed": P()}), eqxshard.fsdp())
        ```
    """

    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """The decision of the first rule that claims the leaf."""
        decisions = (apply_rule(rule, path, leaf, mesh) for rule in self.rules)
        return next((d for d in decisions if d is not None), None)


class combine(_SeveralRules):
    """Split each leaf by several rules in turn: tensor, then fsdp on the remaining dims.

    Each rule sees in `leaf.sharding` what those before it have split, and
    [`eqxshard.fsdp`][] takes that into account. Where two rules split the same dim, the
    earlier one has the larger blocks. The rule claims what any of them claims.

    **Arguments:**

    - `rules`: the rules, most specific first.

    **Raises:**

    `ValueError` if one of them is an [`eqxshard.offload`][], which goes around all; when
    used, if two rules split a leaf over the same axis.

    !!! Example

        ```python
        rule = eqxshard.combine(eqxshard.by_dim({"mlp": "tensor"}), eqxshard.fsdp())
        ```
    """

    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """The union of all decisions."""
        decisions: list[Decision] = []
        split_by: dict[str, str] = {}
        for rule in self.rules:
            decision = apply_rule(rule, path, leaf, mesh)
            if decision is None:
                continue
            decisions.append(decision)
            taken = axes_by_dim(leaf)
            for dim, entry in enumerate(decision.spec):
                for axis in axes_of(entry):
                    if axis in split_by:
                        raise UsageError(
                            f"{path or 'the array'} {leaf.shape}: both {split_by[axis]} "
                            f"and {decision.rule} split it over the axis {axis!r}, which "
                            "can split one dim only; leave it to one of the two."
                        )
                    split_by[axis] = decision.rule
                taken[dim] += axes_of(entry)
            sharding = NamedSharding(mesh, make_spec(taken))
            leaf = NamedLeaf(
                leaf.shape, leaf.dtype, partial(getattr, leaf, "dims", None), sharding
            )
        return _union(decisions, leaf) if decisions else None


def _union(decisions: list[Decision], leaf: jax.ShapeDtypeStruct) -> Decision:
    """Credit the rules that split the leaf or, if none did, all that claimed it."""
    split = [d for d in decisions if any(map(axes_of, d.spec))] or decisions
    notes = [d.note if d in split else f"{d.rule} {d.note}" for d in decisions if d.note]
    names = dict.fromkeys(d.rule for d in split)
    undivided = any(d.undivided for d in decisions)
    return Decision(
        make_spec(axes_by_dim(leaf)), " + ".join(names), "; ".join(notes), undivided
    )


@dataclass(frozen=True)
class offload(AbstractRule):
    """Keep the optimizer's state in host memory; otherwise do as another rule says.

    Each device has its part of the state in pinned memory of its own host (JAX's memory
    kind `pinned_host`), fetches it for the update and sends it back. With Adam, this takes
    two thirds of the training state off the devices, and costs two copies over the bus in
    each step. (ZeRO-Offload, Ren et al. 2021, https://arxiv.org/abs/2101.06840, which also
    updates on the host.) Scalars of the state stay on the devices.

    **Arguments:**

    - `rule`: the rule that splits the arrays, in either memory. It may be an
        [`eqxshard.combine`][] or an [`eqxshard.first_match`][] of several.

    **Raises:**

    When it is used, `ValueError` if the mesh's devices have no such memory, or if JAX is
    older than 0.10.2 and cannot split arrays in it.

    !!! Example

        ```python
        rule = eqxshard.offload(eqxshard.fsdp())
        ```
    """

    rule: Rule

    @property
    def label(self) -> str:
        """The label of the rule inside, in `offload(...)`."""
        return f"offload({rule_name(self.rule)})"

    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """The decision of the rule inside."""
        return apply_rule(self.rule, path, leaf, mesh)

    def check(self, leaves: Leaves, mesh: AnyMesh) -> None:
        """The devices must have pinned host memory; the rule inside checks itself."""
        if jax.__version_info__ < (0, 10, 2):
            raise UsageError(
                f"{self.label} needs JAX 0.10.2 or newer, and this is {jax.__version__}; "
                "upgrade it, or leave offload out."
            )
        here = [] if isinstance(mesh, AbstractMesh) else mesh.local_devices
        for device in here:
            kinds = [memory.kind for memory in device.addressable_memories()]
            # Devices that exist only to compile for list no memories.
            if kinds and HOST_MEMORY not in kinds:
                raise UsageError(
                    f"{self.label} needs memory of the kind {HOST_MEMORY!r}, and {device} "
                    f"has {comma_list(kinds)}; leave offload out."
                )
        check_rule(self.rule, leaves, mesh)

    def map_inside(self, fn: Callable[[Rule], Rule]) -> Rule:
        """An `offload` around another rule."""
        return offload(fn(self.rule))


def optimizer_rule(rule: Rule) -> Rule:
    """The rule for gradients and optimizer state: the same, unless it holds a `zero1`."""
    if isinstance(rule, zero1):
        return rule.update_rule
    return map_rules_inside(rule, optimizer_rule)


def offloads(rule: Rule) -> bool:
    """True if a rule keeps the optimizer's state in host memory."""
    return isinstance(rule, offload)
