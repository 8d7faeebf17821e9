"""A `TrainState` as HTML, for notebooks."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from ..pages._format import format_bytes
from ..sharding._leaves import array_leaves, is_array, is_key
from ..sharding._mesh import describe_mesh
from ..sharding._spec import format_spec

#: The parts of a state that have arrays, and what a reader calls them.
_PARTS = {
    "model": "model",
    "opt_state": "optimizer state",
    "model_state": "the model's own state",
}
#: Arrays that are listed; the table says how many there are besides.
_MOST = 8


class _Array(NamedTuple):
    path: str
    leaf: Any
    bytes: int
    per_device: int


def state_html(state: Any) -> str:
    """What a state has and where it is. Only its step is read from the devices."""
    parts = {name: [*_arrays(name, getattr(state, name))] for name in _PARTS}
    rows = [(_PARTS[name], *_sizes(arrays)) for name, arrays in parts.items() if arrays]
    everything = [array for arrays in parts.values() for array in arrays]
    largest = sorted(everything, key=lambda array: -array.bytes)[:_MOST]
    title = f"<p><strong>TrainState</strong> {escape(_where(state, everything))}</p>"
    sums = _table(["", "arrays", "numbers", "bytes", "bytes per device"], rows)
    count = f"{len(largest)} largest of " if len(largest) < len(everything) else ""
    head = [f"{count}{len(everything)} arrays", "shape", "dtype", "split by"]
    table = _table([*head, "bytes per device"], [*map(_row, largest)])
    return f'<div class="eqxshard">\n{title}\n{sums}\n{table}\n</div>\n'


def _arrays(name: str, part: Any) -> Iterator[_Array]:
    for path, leaf in array_leaves(part, name):
        if not is_key(leaf):
            sharding = leaf.sharding
            shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
            size = leaf.dtype.itemsize
            sizes = size * math.prod(leaf.shape), size * math.prod(shape)
            yield _Array(path, leaf, *sizes)


def _sizes(arrays: Sequence[_Array]) -> tuple[str, str, str, str]:
    return (
        str(len(arrays)),
        f"{sum(math.prod(array.leaf.shape) for array in arrays):,}",
        format_bytes(sum(array.bytes for array in arrays)),
        format_bytes(sum(array.per_device for array in arrays)),
    )


def _row(array: _Array) -> tuple[str, ...]:
    leaf = array.leaf
    shape = " x ".join(map(str, leaf.shape)) or "scalar"
    sharding = leaf.sharding
    named = isinstance(sharding, NamedSharding)
    where = format_spec(sharding.spec) if named else str(sharding or "")
    return array.path, shape, str(leaf.dtype), where, format_bytes(array.per_device)


def _where(state: Any, arrays: Sequence[_Array]) -> str:
    """At which step it is, and on which mesh."""
    meshes = {
        array.leaf.sharding.mesh
        for array in arrays
        if isinstance(array.leaf.sharding, NamedSharding)
        and isinstance(array.leaf.sharding.mesh, Mesh)
    }
    on = f", on {describe_mesh(*meshes)}" if len(meshes) == 1 else ""
    step = state.step
    if isinstance(step, jax.Array):
        if step.is_deleted():
            return f"that a step has taken{on}; look at the one that the step returned"
        return f"at step {int(step)}{on}"
    return f"of shapes only{on}" if is_array(step) else f"without a step{on}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose rows begin with a name; all of its text is escaped."""
    left = ' style="text-align:left"'
    cells = (f'<th scope="col"{left}>{escape(name)}</th>' for name in head)
    lines = ["<table>", f"<thead><tr>{''.join(cells)}</tr></thead>", "<tbody>"]
    for name, *rest in rows:
        cells = (f"<td{left}>{escape(text)}</td>" for text in rest)
        lines.append(f'<tr><th scope="row"{left}>{escape(name)}</th>{"".join(cells)}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])
