"""Lint of a rule: what it leaves whole, and which of its parts decide nothing."""

import math
import re
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh

from ..compiled._findings import SMALL, Finding
from ..sharding._combinators import combine, first_match, offload
from ..sharding._leaf_rules import by_dim, by_path, fsdp, replicate, zero1
from ..sharding._leaves import format_array
from ..sharding._rule import Decision, NamedLeaf, Rule, apply_rule, check_rule, rule_name
from ..sharding._spec import format_sizes, spec_axes
from ..sharding._text import comma_list

#: Axes that exist to split parameters.
_MODEL_AXES = ("fsdp", "tensor")
#: A leaf is large from so many bytes, and so much of what a device holds of the model.
_LARGE, _SHARE = 2**20, 0.05

_Leaves = Sequence[tuple[str, NamedLeaf]]


def lint_rule(
    rule: Rule, leaves: _Leaves, decisions: Sequence[Decision], mesh: Mesh
) -> Iterator[Finding]:
    """The findings of kinds `whole`, `large-whole` and `unmatched`.

    **Arguments:**

    - `rule`: the rule.
    - `leaves`, `decisions`: the arrays of a model, and the rule's decision for each.
    - `mesh`: the mesh.
    """
    sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
    parts = [
        nbytes(leaf) // math.prod(sizes.get(axis, 1) for axis in spec_axes(decision.spec))
        for (_, leaf), decision in zip(leaves, decisions, strict=True)
    ]
    large = max(_LARGE, _SHARE * sum(parts))
    for (path, leaf), decision in zip(leaves, decisions, strict=True):
        name = f"{path or 'the array'} {format_array(leaf)}"
        if not sizes.keys().isdisjoint(spec_axes(decision.spec)):
            continue
        if decision.undivided and nbytes(leaf) >= SMALL:
            yield Finding(
                "whole",
                path,
                None,
                f"{name} is whole on every device, though {decision.rule} asked for a "
                f"split ({decision.note}). Pad one of its dims to a multiple.",
            )
        elif nbytes(leaf) >= large and not _is_meant(rule, path, leaf, mesh):
            axes = {
                axis: n
                for axis, n in sizes.items()
                if axis in _MODEL_AXES and any(size % n == 0 for size in leaf.shape)
            }
            if axes:
                yield Finding(
                    "large-whole",
                    path,
                    None,
                    f"{name} is whole on every device, by {decision.rule}, and the mesh "
                    f"could split it over {format_sizes(axes)}. Add a rule that does, as "
                    "combine(..., fsdp()), or by_path({...: P()}) to keep it whole.",
                )
    yield from _unmatched(rule, leaves, mesh)


def nbytes(leaf: NamedLeaf) -> int:
    """The bytes of a whole array."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _is_meant(rule: Rule, path: str, leaf: NamedLeaf, mesh: Mesh) -> bool:
    """Whether one of the rules that decide about a leaf keeps it whole on purpose."""
    for decides in _deciding(rule, path, leaf, mesh):
        match decides:
            case replicate() | by_dim():
                pass
            case fsdp():
                if math.prod(leaf.shape) < decides.min_size:
                    return True
            case by_path():
                decision = decides.decide(path, leaf, mesh)
                if decision is not None and not spec_axes(decision.spec):
                    return True
            case _:
                return True
    return False


def _deciding(rule: Rule, path: str, leaf: NamedLeaf, mesh: Mesh) -> Iterator[Rule]:
    match rule:
        case first_match():
            first = next(each for each in rule.rules if _claims(each, path, leaf, mesh))
            yield from _deciding(first, path, leaf, mesh)
        case combine():
            for each in rule.rules:
                if _claims(each, path, leaf, mesh):
                    yield from _deciding(each, path, leaf, mesh)
        case offload():
            yield from _deciding(rule.rule, path, leaf, mesh)
        case _:
            yield rule


def _claims(rule: Rule, path: str, leaf: NamedLeaf, mesh: Mesh) -> bool:
    try:
        return apply_rule(rule, path, leaf, mesh) is not None
    except Exception:  # It need not fit a leaf that an earlier rule decides about.
        return True


def _unmatched(rule: Rule, leaves: _Leaves, mesh: Mesh) -> Iterator[Finding]:
    try:
        check_rule(rule, dict(leaves), mesh)
    except ValueError as error:
        # `init_state` would have refused this rule, but it made the state with another.
        yield Finding("unmatched", None, None, str(error))
    else:
        yield from _shadowed(rule, leaves, mesh)


def _shadowed(rule: Rule, leaves: _Leaves, mesh: Mesh) -> Iterator[Finding]:
    """Patterns and rules of which earlier ones have decided all leaves."""
    match rule:
        case by_path():
            yield from _shadowed_patterns(rule, [path for path, _ in leaves])
        case first_match():
            left = [path for path, _ in leaves]
            for number, each in enumerate(rule.rules):
                claimed = [item for item in leaves if _claims(each, *item, mesh)]
                paths = {path for path, _ in claimed}
                rest = [path for path in left if path in paths]
                # A last rule for everything else may be there just in case.
                for_all = isinstance(each, replicate | fsdp | zero1)
                if claimed and not rest and not for_all:
                    earlier = comma_list(map(rule_name, rule.rules[:number]))
                    yield _says(rule_name(each), earlier, [path for path, _ in claimed])
                yield from _shadowed(each, leaves, mesh)
                left = [path for path in left if path not in paths]
        case combine():
            for each in rule.rules:
                yield from _shadowed(each, leaves, mesh)
        case offload():
            yield from _shadowed(rule.rule, leaves, mesh)


def _shadowed_patterns(rule: by_path, paths: list[str]) -> Iterator[Finding]:
    patterns = [pattern for pattern, _ in rule.specs]
    for number, pattern in enumerate(patterns):
        matched = [path for path in paths if re.search(pattern, path)]
        first = [next(p for p in patterns if re.search(p, path)) for path in matched]
        if matched and pattern not in first:
            earlier = comma_list(repr(p) for p in patterns[:number] if p in first)
            yield _says(f"by_path({pattern!r})", earlier, matched)


def _says(rule: str, earlier: str, paths: Sequence[str]) -> Finding:
    return Finding(
        "unmatched",
        paths[0],
        None,
        f"{rule} decides nothing: {earlier} comes first and claims all that it matches, "
        f"such as {paths[0]}. Put it first, or remove it.",
    )
