"""How a rule splits an optimizer's state, most of which belongs to parameters."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import SequenceKey
from jaxtyping import PyTree

from .._errors import UsageError
from ._leaf_rules import by_path
from ._leaves import is_array, is_key, leaf_path
from ._placement import named_leaves
from ._rule import Decision, NamedLeaf, Rule, apply_rule, map_rules_inside, rule_name
from ._spec import AnyMesh, check_spec, spec_axes

_Path = tuple[Any, ...]


class StateLeaf(NamedTuple):
    """An array of an optimizer's state.

    - `path`: its path in the state, such as `0.v_row.layers.0.weight`.
    - `leaf`: the array.
    - `param`: the path of the one parameter that it belongs to; `None` if there is none.
    - `decision`: how it is split.
    - `same_shape`: whether it is shaped, and so split, like that parameter.
    """

    path: str
    leaf: Any
    param: str | None
    decision: Decision
    same_shape: bool


def decide_opt_state(
    opt_state: PyTree,
    params: PyTree,
    decisions: Sequence[Decision],
    mesh: AnyMesh,
    rule: Rule,
) -> list[StateLeaf]:
    """The decision for each array of an optimizer's state.

    An array in the shape of its parameter is split like the parameter. For one in another
    shape, such as the factors of Adafactor and the matrices of Shampoo, the rule is asked
    under the path of the parameter; for one that belongs to no single parameter, under its
    own path. Scalars, random keys, and arrays that the rule does not claim are whole on
    every device.

    **Arguments:**

    - `opt_state`, `params`: arrays, or `jax.ShapeDtypeStruct`s for them.
    - `decisions`: one for each of `params`: how their updates are split.
    - `mesh`, `rule`: those of the decisions.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    known = dict(zip(paths, zip(named_leaves(params), decisions), strict=True))
    asked = _for_other_shapes(rule)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if not is_array(leaf):
            continue
        owner: Any = _owner(path, known)
        (param, like), decision = known.get(owner, ((None, None), None))
        same_shape = like is not None and leaf.shape == like.shape
        if not same_shape:
            if leaf.shape == () or is_key(leaf):
                decision = Decision(PartitionSpec(), "", "always replicated")
            else:
                decision = _ask(asked, leaf_path(path), leaf, param, decision, mesh)
        assert decision is not None  # Every parameter has one.
        found.append(StateLeaf(leaf_path(path), leaf, param, decision, same_shape))
    return found


def _owner(path: _Path, params: Collection[_Path]) -> _Path | None:
    """The path of the parameter within the path of an array of the state, if it is there.

    It may be at the end, as in `0.mu.layers.0.weight`, or earlier, as in
    `0.factors.weight.1`. But earlier it must be more than numbers, which may be the place
    in a chain of optimizers.
    """
    for length in range(len(path), -1, -1):
        for end in range(len(path), length - 1, -1):
            part = path[end - length : end]
            named = any(not isinstance(key, SequenceKey) for key in part)
            if part in params and (named or end == len(path)):
                return part
    return None


def _ask(
    rule: Rule,
    path: str,
    leaf: Any,
    param: str | None,
    of_param: Decision | None,
    mesh: AnyMesh,
) -> Decision:
    """The decision for an array that is not shaped like its parameter, or has none."""
    own_path = f"opt_state.{path}" if path else "opt_state"
    asked = NamedLeaf(leaf.shape, leaf.dtype, lambda: None)
    try:
        decision = apply_rule(rule, own_path if param is None else param, asked, mesh)
    except UsageError as error:
        raise UsageError(
            f"the rule does not fit {own_path}, which is not shaped like a parameter: "
            f"{error}"
        ) from error
    if decision is not None:
        return decision
    note = "no spec for this shape; add fsdp() to the rule with combine"
    lost = of_param is not None and is_split(of_param.spec, mesh)
    return Decision(PartitionSpec(), rule_name(rule), note, undivided=lost)


def is_split(spec: Any, mesh: AnyMesh) -> bool:
    """True if a spec splits anything on this mesh."""
    return any(mesh.shape[axis] > 1 for axis in spec_axes(spec))


def _for_other_shapes(rule: Rule) -> Rule:
    """The same rule, except that `by_path` claims only the arrays that its specs fit."""
    if isinstance(rule, by_path):
        return _WhereItFits(dict(rule.specs))
    return map_rules_inside(rule, _for_other_shapes)


class _WhereItFits(by_path):
    """A `by_path` whose specs were written for arrays in the shapes of the parameters."""

    def decide(
        self, path: str, leaf: jax.ShapeDtypeStruct, mesh: AnyMesh
    ) -> Decision | None:
        """The spec of the first pattern found in the path, if the array can have it."""
        decision = super().decide(path, leaf, mesh)
        if decision is None:
            return None
        try:
            check_spec(path, leaf.shape, decision.spec, mesh)
        except UsageError:
            return None
        return decision
