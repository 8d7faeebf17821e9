"""How much two results of a step differ, array by array."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, Shaped

from ..sharding import is_array, is_key, leaf_path

#: The arrays of a state on the host, by name: what a step changes first comes first.
Arrays = Mapping[str, Shaped[np.ndarray, "..."]]

_KINDS = ("gradients", "model", "opt_state")

#: A gradient is seen relative to the model's largest, where its own largest entry is less
#: than this part of that: it may be zero but for rounding.
_SMALL = 0.1


class Result(NamedTuple):
    """One step's.

    - `loss`, `nonfinite`: as its metrics have them.
    - `arrays`: the state after it.
    - `uneven`: the names of those that are not the same on all devices that should have
        the same.
    """

    loss: float
    nonfinite: int
    arrays: Arrays
    uneven: list[str]


class Difference(NamedTuple):
    """How much one thing differs from one device's.

    - `name`: such as `gradients.layers.0.weight`.
    - `absolute`: max |a - b|.
    - `relative`: max |a - b| / max |b|.
    - `excess`: the same of what neither the gradients' rounding nor the precision explains.
    """

    name: str
    absolute: float
    relative: float
    excess: float


def read(state: PyTree) -> Arrays:
    """The arrays of a state whose optimizer records gradients, copied to the host."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if is_array(leaf):
            numbers = jax.random.key_data(leaf) if is_key(leaf) else leaf
            # Copied, because the array itself is donated to the next step.
            found[_name(path)] = np.array(numbers)
    return dict(sorted(found.items(), key=lambda item: _rank(item[0])))


def uneven(state: PyTree) -> list[str]:
    """The names of arrays of which devices that should have the same part have not."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if is_array(leaf) and not is_key(leaf):
            parts: dict[str, set[bytes]] = {}
            for shard in leaf.addressable_shards:
                part = np.asarray(shard.data).tobytes()
                parts.setdefault(str(shard.index), set()).add(part)
            if any(len(different) > 1 for different in parts.values()):
                found.append(_name(path))
    return sorted(found, key=_rank)


def load(state: PyTree, arrays: Arrays) -> PyTree:
    """A state like another, with other values; random keys stay as they are."""

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array(leaf) or is_key(leaf):
            return leaf
        return jax.device_put(arrays[_name(path)], leaf.sharding, may_alias=False)

    return jax.tree_util.tree_map_with_path(one, state)


def differences(
    ours: Result, theirs: Result, before: Arrays, costs: Mapping[str, float]
) -> list[Difference]:
    """Everything in a step's result, compared with one device's.

    **Arguments:**

    - `ours`, `theirs`: on a mesh, and on one device.
    - `before`: the state before the step, of both.
    - `costs`: the absolute difference that the precision itself makes to a gradient.
    """
    gradients = {
        name: (a, theirs.arrays[name])
        for name, a in ours.arrays.items()
        if kind_of(name) == "gradients"
    }
    largest = max((_top(b) for _, b in gradients.values()), default=0.0)
    unsure = {name.removeprefix("gradients"): _unsure(*g) for name, g in gradients.items()}
    found = [
        difference("nonfinite", np.asarray(ours.nonfinite), np.asarray(theirs.nonfinite)),
        difference("loss", np.asarray(ours.loss), np.asarray(theirs.loss)),
    ]
    for name, a in ours.arrays.items():
        b, slack, scale = theirs.arrays[name], 0.0, 0.0
        if name in gradients:
            slack, scale = 2 * costs.get(name, 0.0), _SMALL * largest
        elif jnp.issubdtype(b.dtype, jnp.inexact):
            reach = max(_top(a), _top(b))
            if kind_of(name) == "model":
                reach = max(_top(a, before[name]), _top(b, before[name]))
            slack = reach * _of_same_array(name, b.shape, unsure)
        found.append(difference(name, a, b, slack, scale))
    return found


def costs(exact: Result, ours: Result) -> dict[str, float]:
    """The absolute difference of each gradient from the exact one."""
    return {
        name: _top(a, exact.arrays[name])
        for name, a in ours.arrays.items()
        if kind_of(name) == "gradients"
    }


def kind_of(name: str) -> str:
    """What an array is part of: `gradients`, `model`, `opt_state`, ..."""
    return name.partition(".")[0]


def difference(
    name: str, a: np.ndarray, b: np.ndarray, slack: Any = 0.0, scale: float = 0.0
) -> Difference:
    """Compare two arrays, allowing for `slack`, relative to `scale` if that is larger."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(_wide(a) - _wide(b))
    # Two infinities are alike; nan is like nothing.
    apart = np.where(a == b, 0.0, np.nan_to_num(apart, nan=np.inf))
    scale = max(scale, _top(b))

    def over(top: float) -> float:
        # What is no number, such as a count, is equal or is not.
        exact = not jnp.issubdtype(b.dtype, jnp.inexact) or not scale
        return 0.0 if top <= 0 else float("inf") if exact else top / scale

    top = float(np.max(apart, initial=0.0))
    beyond = float(np.max(apart - slack, initial=0.0))
    return Difference(name, top, over(top), over(beyond))


def _unsure(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How much of an update the rounding of a gradient can turn around, for each element.

    At most all of it, and back: twice. An update that is divided by the gradient's size,
    such as Adam's by each element's or LAMB's by a norm, is out by as much as they are;
    four times that is generous.
    """

    def over(apart: Any, size: Any) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(apart == 0, 0.0, np.divide(apart, size))

    apart, size = np.abs(_wide(a) - _wide(b)), np.abs(_wide(b))
    of_all = over(np.max(apart, initial=0.0), np.max(size, initial=0.0))
    return np.minimum(4 * np.maximum(over(apart, size), of_all), 2.0)


def _of_same_array(
    name: str, shape: tuple[int, ...], unsure: Mapping[str, np.ndarray]
) -> np.ndarray | float:
    """The entry for the parameter that an array is, or is the optimizer's state for."""
    same = [path for path, x in unsure.items() if name.endswith(path) and x.shape == shape]
    return unsure[max(same, key=len)] if same else 0.0


def _top(a: np.ndarray, b: np.ndarray | float = 0.0) -> float:
    """The largest |a - b|."""
    return float(np.max(np.abs(_wide(a) - _wide(b)), initial=0.0))


def _wide(a: Any) -> np.ndarray:
    a = np.asarray(a)
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def _name(path: tuple[Any, ...]) -> str:
    name = leaf_path(path)
    for start, kind in (("opt_state.0", "gradients"), ("opt_state.1", "opt_state")):
        if name.startswith(start):
            return kind + name.removeprefix(start)
    return name


def _rank(name: str) -> int:
    return _KINDS.index(kind_of(name)) if kind_of(name) in _KINDS else len(_KINDS)
