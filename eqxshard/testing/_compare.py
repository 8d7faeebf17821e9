"""How much the results of a step differ between a mesh and one device, array by array."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, Shaped

from ..sharding._leaves import array_leaves, is_array, is_key, leaf_path

#: The arrays of a state on the host, by name, in the order in which a step computes them.
Arrays = Mapping[str, Shaped[np.ndarray, "..."]]

_KINDS = ("gradients", "model", "opt_state")

#: A gradient whose largest entry is below this fraction of the model's largest is compared
#: relative to that fraction: it may be zero but for rounding.
_SMALL = 0.1


class Result(NamedTuple):
    """The result of one step.

    - `loss`, `nonfinite`: from its metrics.
    - `arrays`: the state after it.
    - `diverged`: the names of arrays whose replicas differ between devices.
    """

    loss: float
    nonfinite: int
    arrays: Arrays
    diverged: list[str]


class Difference(NamedTuple):
    """How much one value differs from one device's.

    - `name`: the value's name, such as `gradients.layers.0.weight`.
    - `absolute`: max |a - b|.
    - `relative`: max |a - b| / max |b|.
    - `excess`: the part of `relative` that the rounding of gradients does not explain.
    """

    name: str
    absolute: float
    relative: float
    excess: float


def to_host(state: PyTree) -> Arrays:
    """The arrays of a state whose optimizer records gradients, copied to the host."""
    found = {}
    for path, leaf in array_leaves(state):
        numbers = jax.random.key_data(leaf) if is_key(leaf) else leaf
        # Copied, because the array itself is donated to the next step.
        found[_name(path)] = np.array(numbers)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def diverged_replicas(state: PyTree) -> list[str]:
    """The names of arrays whose copies on different devices differ."""
    found = []
    for path, leaf in array_leaves(state):
        if not is_key(leaf):
            copies: dict[str, set[bytes]] = {}
            for shard in leaf.addressable_shards:
                copy = np.asarray(shard.data).tobytes()
                copies.setdefault(str(shard.index), set()).add(copy)
            if any(len(different) > 1 for different in copies.values()):
                found.append(_name(path))
    return sorted(found, key=_order)


def with_arrays(state: PyTree, arrays: Arrays) -> PyTree:
    """A state like another, with other values; random keys stay as they are."""

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_array(leaf) or is_key(leaf):
            return leaf
        array = arrays[_name(leaf_path(path))]
        return jax.device_put(array, leaf.sharding, may_alias=False)

    return jax.tree_util.tree_map_with_path(replace, state)


def compare_results(result: Result, reference: Result, before: Arrays) -> list[Difference]:
    """Compare everything in a step's result with one device's.

    **Arguments:**

    - `result`, `reference`: on a mesh, and on one device.
    - `before`: the state that both steps started from.
    """
    gradients = {
        name: (a, reference.arrays[name])
        for name, a in result.arrays.items()
        if kind_of(name) == "gradients"
    }
    largest = max((_max_difference(b) for _, b in gradients.values()), default=0.0)
    uncertainty = {
        name.removeprefix("gradients"): _update_uncertainty(*pair)
        for name, pair in gradients.items()
    }
    found = [
        compare("nonfinite", np.asarray(result.nonfinite), np.asarray(reference.nonfinite)),
        compare("loss", np.asarray(result.loss), np.asarray(reference.loss)),
    ]
    for name, a in result.arrays.items():
        b, allowed, scale = reference.arrays[name], 0.0, 0.0
        if name in gradients:
            scale = _SMALL * largest
        elif jnp.issubdtype(b.dtype, jnp.inexact):
            old = before[name]
            if kind_of(name) == "model":
                size = max(_max_difference(a, old), _max_difference(b, old))
            else:
                # A moment may shrink to less than the rounding of what is added to it.
                size = max(map(_max_difference, (a, b, old)))
            allowed = size * _of_parameter(name, b.shape, uncertainty)
        found.append(compare(name, a, b, allowed, scale))
    return found


def kind_of(name: str) -> str:
    """The part of the result that an array belongs to: `gradients`, `model`, ..."""
    return name.partition(".")[0]


def compare(
    name: str, a: np.ndarray, b: np.ndarray, allowed: Any = 0.0, scale: float = 0.0
) -> Difference:
    """Compare two arrays.

    **Arguments:**

    - `name`: the name of the difference.
    - `a`, `b`: the arrays.
    - `allowed`: the absolute difference that `excess` does not count.
    - `scale`: the reference of relative differences, if it is larger than max |b|.
    """
    with np.errstate(invalid="ignore"):
        absolute = np.abs(_to_double(a) - _to_double(b))
    # Equal infinities do not differ; a nan differs from everything.
    absolute = np.where(a == b, 0.0, np.nan_to_num(absolute, nan=np.inf))
    scale = max(scale, _max_difference(b))

    def relative(largest: float) -> float:
        # Integers, such as counts, are equal or not.
        exact = not jnp.issubdtype(b.dtype, jnp.inexact) or not scale
        return 0.0 if largest <= 0 else float("inf") if exact else largest / scale

    largest = float(np.max(absolute, initial=0.0))
    excess = float(np.max(absolute - allowed, initial=0.0))
    return Difference(name, largest, relative(largest), relative(excess))


def _update_uncertainty(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The fraction of an update that rounding of a gradient can change, per element.

    At most 2: rounding can turn an update around. An update that is divided by the size of
    the gradient (of each element in Adam, of its norm in LAMB) has the relative error of
    the gradient; four times that is generous.
    """

    def divide(absolute: Any, size: Any) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(absolute == 0, 0.0, np.divide(absolute, size))

    absolute, size = np.abs(_to_double(a) - _to_double(b)), np.abs(_to_double(b))
    of_norm = divide(np.max(absolute, initial=0.0), np.max(size, initial=0.0))
    return np.minimum(4 * np.maximum(divide(absolute, size), of_norm), 2.0)


def _of_parameter(
    name: str, shape: tuple[int, ...], by_parameter: Mapping[str, np.ndarray]
) -> np.ndarray | float:
    """The entry of a parameter; for optimizer state, the entry of its parameter."""
    paths = [
        path for path, x in by_parameter.items() if name.endswith(path) and x.shape == shape
    ]
    return by_parameter[max(paths, key=len)] if paths else 0.0


def _max_difference(a: np.ndarray, b: np.ndarray | float = 0.0) -> float:
    """The largest |a - b|."""
    return float(np.max(np.abs(_to_double(a) - _to_double(b)), initial=0.0))


def _to_double(a: Any) -> np.ndarray:
    a = np.asarray(a)
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def _name(path: str) -> str:
    """The name of an array of a state: its path, or `gradients.` and a parameter's."""
    for start, kind in (("opt_state.0", "gradients"), ("opt_state.1", "opt_state")):
        if path.startswith(start):
            return kind + path.removeprefix(start)
    return path


def _order(name: str) -> int:
    return _KINDS.index(kind_of(name)) if kind_of(name) in _KINDS else len(_KINDS)
