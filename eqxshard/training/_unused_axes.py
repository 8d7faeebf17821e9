"""Axes of a mesh over which a step splits nothing."""

import re
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from ..sharding._leaf_rules import replicate
from ..sharding._leaves import is_array
from ..sharding._mesh import describe_mesh
from ..sharding._rule import Rule, rule_name
from ..sharding._spec import spec_axes
from ..sharding._text import comma_list
from ._state import TrainState

#: The dims of a sharding in the text of a lowered step: `<@mesh, [{"data"}, {}]>`.
_DIMS = re.compile(r"<@\w+, \[([^\]]*)\]")


def unused_axes(
    state: TrainState, mesh: Mesh, rule: Rule, lower: Callable[[], jax.stages.Lowered]
) -> Iterator[str]:
    """What to warn of: a rule, or axes, that split nothing.

    **Arguments:**

    - `state`, `mesh`, `rule`: those of the step.
    - `lower`: lowers the step; called if an axis splits no array of the state, which the
        loss may still use.
    """
    arrays = filter(is_array, jax.tree.leaves((state.model, state.opt_state)))
    split = {axis for array in arrays for axis in spec_axes(array.sharding.spec)}
    idle = {axis: n for axis, n in mesh.shape.items() if n > 1 and axis not in split}
    splits_none = len(idle) == sum(n > 1 for n in mesh.shape.values())
    if "fsdp" in idle or (idle and splits_none and rule != replicate()):
        yield (
            f"{rule_name(rule)} splits no array over {comma_list(idle)} on "
            f"{describe_mesh(mesh)}, so each device holds all of them; use a mesh with an "
            "axis that the rule splits over, or another rule, such as eqxshard.fsdp() with "
            "a smaller min_size."
        )
    others = idle.keys() - {"data", "fsdp"}
    if not others:
        return
    dims = " ".join(_DIMS.findall(lower().as_text()))
    for axis in (axis for axis in idle if axis in others and f'"{axis}"' not in dims):
        yield (
            f"nothing is split over {axis}={idle[axis]}, so its devices repeat the same "
            f"work; use them for data, or use a rule that splits arrays over {axis}."
        )
