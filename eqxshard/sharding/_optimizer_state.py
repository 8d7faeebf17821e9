"""What a rule says of an optimizer's state, most of which belongs to parameters."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.tree_util import SequenceKey
from jaxtyping import PyTree

from ._combinators import combine, first_match
from ._leaf_rules import read_dims
from ._leaves import is_array, is_key, leaf_path
from ._placement import named_leaves
from ._rule import (
    AbstractRule,
    Decision,
    Leaves,
    NamedLeaf,
    Rule,
    apply_rule,
    rule_name,
)
from ._spec import axes_of, axis_sizes, make_spec, only, spec_axes

_Path = tuple[Any, ...]


class StateLeaf(NamedTuple):
    """An array of an optimizer's state.

    - `path`: in the state, such as `0.v_row.layers.0.weight`.
    - `leaf`: the array.
    - `param`: the path of the parameter that it is for alone; `None` if there is none.
    - `decision`: how it is split.
    - `same_shape`: whether it is shaped, and so split, like that parameter.
    """

    path: str
    leaf: Any
    param: str | None
    decision: Decision
    same_shape: bool


def decide_opt_state(
    opt_state: PyTree, params: PyTree, decisions: Sequence[Decision], mesh: Mesh, rule: Rule
) -> list[StateLeaf]:
    """The decision for each array of an optimizer's state.

    What is shaped like its parameter is split like it. Of what is shaped otherwise, such as
    the factors of Adafactor and the matrices of Shampoo, a dim that can only be one of the
    parameter's is split like that one. Then the rule is asked about the array, under the
    path of the parameter and with the names of these dims, and splits what is left. An
    array that is for no parameter alone is asked about under its own path.

    **Arguments:**

    - `opt_state`, `params`: arrays, or `jax.ShapeDtypeStruct`s for them.
    - `decisions`: one for each of `params`: how their updates are split.
    - `mesh`, `rule`: those of the decisions.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    known = dict(zip(paths, zip(named_leaves(params), decisions), strict=True))
    asked = _if_it_fits(rule)
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if not is_array(leaf):
            continue
        owner: Any = _owner(path, known)
        (param, like), decision = known.get(owner, ((None, None), None))
        same_shape = like is not None and leaf.shape == like.shape
        if not same_shape:
            if leaf.shape == () or is_key(leaf):
                decision = Decision(make_spec([]), "", "always replicated")
            else:
                name = leaf_path(path, "opt_state") if param is None else param
                decision = _decide(name, leaf, like, decision, mesh, asked)
        assert decision is not None  # Or there is no parameter of the same shape.
        found.append(StateLeaf(leaf_path(path), leaf, param, decision, same_shape))
    return found


def _owner(path: _Path, params: Collection[_Path]) -> _Path | None:
    """The path of the parameter in that of an array of the state.

    At its end, as in `0.mu.layers.0.weight`; or before it, as in `0.factors.weight.1`, but
    then it is no mere number, which may be the place in a chain of optimizers.
    """
    for length in range(len(path), -1, -1):
        for end in range(len(path), length - 1, -1):
            part = path[end - length : end]
            named = any(not isinstance(key, SequenceKey) for key in part)
            if part in params and (named or end == len(path)):
                return part
    return None


def _decide(
    name: str,
    leaf: Any,
    param: NamedLeaf | None,
    of_param: Decision | None,
    mesh: Mesh,
    rule: Rule,
) -> Decision:
    """The decision for an array that is not shaped like its parameter, or has none."""
    axes: list[tuple[str, ...]] = [()] * len(leaf.shape)
    dims: list[str | None] = [None] * len(leaf.shape)
    if param is not None and of_param is not None:
        entries = [axes_of(entry) for entry in of_param.spec]
        names = read_dims(param)[0]
        origins = _origins(leaf.shape, param.shape, names[:1] == ("layers",))
        for d, origin in enumerate(origins):
            # Of a square matrix, nobody knows which dim a vector belongs to. And an axis
            # splits one dim only, so of the matrix of a dim with itself, the first.
            split, called = _agreed(entries, origin) or (), _agreed(names, origin)
            axes[d] = () if split in axes else split
            dims[d] = None if called in dims else called
    asked = NamedLeaf(leaf.shape, leaf.dtype, lambda: tuple(dims))
    decision = apply_rule(rule, name, asked, mesh)
    rules = [of_param.rule] if of_param is not None and any(axes) else []
    for d, entry in enumerate(decision.spec if decision else ()):
        taken = {axis for each in axes for axis in each}
        more = only(entry, lambda axis: axis not in taken) or ()  # noqa: B023
        parts = math.prod(axis_sizes((*axes[d], *more), mesh).values())
        if decision and more and leaf.shape[d] % parts == 0:
            axes[d] += more
            rules.append(decision.rule)
    spec = make_spec(axes)
    if is_split(spec, mesh):
        return Decision(spec, " + ".join(dict.fromkeys(rules)))
    if decision is not None:
        return decision._replace(spec=spec)
    note = "no spec for this shape; add fsdp() to the rule with combine"
    lost = of_param is not None and is_split(of_param.spec, mesh)
    return Decision(spec, rule_name(rule), note, undivided=lost)


def is_split(spec: Any, mesh: Mesh) -> bool:
    """Whether a spec splits anything on this mesh."""
    return any(mesh.shape[axis] > 1 for axis in spec_axes(spec))


def _origins(
    shape: tuple[int, ...], param: tuple[int, ...], stacked: bool
) -> list[set[int | None]]:
    """For each dim of an array, which dims of its parameter it may be; `None` for another.

    As the dims are in order where possible, or else by their sizes.
    """
    if stacked and shape[:1] == param[:1]:
        rest = _origins(shape[1:], param[1:], False)
        return [{0}, *({d if d is None else d + 1 for d in dims} for dims in rest)]
    few, many = sorted((shape, param), key=len)
    fits = [
        places
        for places in itertools.combinations(range(len(many)), len(few))
        if all(many[place] == size for place, size in zip(places, few))
    ]
    if not fits:
        return [{i for i, n in enumerate(param) if n == size} or {None} for size in shape]
    if few is shape:
        return [{fit[d] for fit in fits} for d in range(len(shape))]
    return [{fit.index(d) if d in fit else None for fit in fits} for d in range(len(shape))]


def _agreed(values: Sequence[Any], places: Collection[int | None]) -> Any:
    """The value at all of these places, where it is the same; `None` beyond the last."""
    found = {
        values[place] if place is not None and place < len(values) else None
        for place in places
    }
    return found.pop() if len(found) == 1 else None


def _if_it_fits(rule: Rule) -> Rule:
    """A rule that leaves to others what it, or a part of it, has no answer for."""
    if isinstance(rule, first_match | combine):
        rule = type(rule)(*map(_if_it_fits, rule.rules))
    return _IfItFits(rule)


@dataclass(frozen=True)
class _IfItFits(AbstractRule):
    """A rule that was made for arrays of other shapes, such as `P(None, "tensor")`."""

    rule: Rule

    @property
    def label(self) -> str:
        """That of the rule inside."""
        return rule_name(self.rule)

    def decide(self, path: str, leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Decision | None:
        """That of the rule inside, if it raises no error."""
        try:
            return apply_rule(self.rule, path, leaf, mesh)
        except (
            Exception
        ):  # A function of the user's, too, may index dims that are not there.
            return None

    def check(self, leaves: Leaves, mesh: Mesh) -> None:
        """The rule was checked with the parameters."""
