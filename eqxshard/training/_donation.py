"""Arrays that steps donate, and copies of those that something else needs too."""

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._errors import UsageError
from .._jax import Tracer
from ..sharding._leaves import is_key

if TYPE_CHECKING:
    from ._state import TrainState

_TYPE, _DTYPE = operator.attrgetter("shape", "dtype"), operator.attrgetter("dtype")
#: The dtype of the data of keys.
_BITS = np.dtype(np.uint32)


def any_donated(arrays: Iterable[Any]) -> bool:
    """True if a step has taken one of these arrays."""
    for array in arrays:
        if isinstance(array, Tracer):
            continue
        if isinstance(array, jax.Array) and array.is_deleted():
            return True
    return False


def check_state_not_donated(tree: PyTree) -> None:
    """Refuse a state, or a part of one, that a step has taken."""
    if any_donated(jax.tree.leaves(tree)):
        raise UsageError(
            "this state was donated to an earlier step, and its model with it; use the "
            "state that the step returned."
        )


def check_not_donated(tree: PyTree, name: str) -> None:
    """Refuse another argument that a step has taken: JAX 0.10 segfaults on it."""
    if any_donated(jax.tree.leaves(tree)):
        raise UsageError(
            f"an array of the {name} was donated to an earlier call, or deleted; take it "
            "from the newest state, or copy it before it is donated."
        )


def donatable(
    state: "TrainState", arrays: list[Any], kept: Sequence[Any], batch: PyTree
) -> list[Any]:
    """The arrays of a state that a step returned, to donate; copies of shared ones.

    **Arguments:**

    - `state`, `arrays`: the state, and its arrays.
    - `kept`, `batch`: the other arguments of the step, which are not donated.

    **Raises:**

    `ValueError` if the state was donated before.
    """
    # Until somebody reads a state, nothing else has its arrays, except for the first, the
    # number of steps. All are donated together, so the first tells whether they were.
    seen = arrays[:1] if state._values is None else arrays
    if seen is arrays or arrays[0].is_deleted():
        check_state_not_donated(seen)
    others = jax.tree.leaves(batch)
    if kept and not _was_beside(state, kept):
        others += kept
    # Addresses are slow to read. Arrays of the same memory have the same type, but for keys
    # and their data.
    bits = _BITS in {*map(_DTYPE, seen), *map(_DTYPE, others)}
    if not bits and {*map(_TYPE, seen)}.isdisjoint(map(_TYPE, others)):
        return arrays
    return copy_shared(seen, others) + arrays[len(seen) :]


def _was_beside(state: "TrainState", arrays: Sequence[Any]) -> bool:
    """True if these arrays, and no others, were there before those of a state."""
    given = [x for x in arrays if isinstance(x, jax.Array)]
    known = [ref() for ref in state._beside]
    return len(given) == len(known) and all(map(operator.is_, given, known))


def copy_shared(arrays: Sequence[Any], others: Sequence[Any] = ()) -> list[Any]:
    """Copy those of the arrays to donate whose memory another array has, too.

    The other one is among `others`, such as after `target = state.model`, or after
    `jax.device_put` of that, which makes other arrays of the same memory; or it is earlier
    in the list, such as after
    `eqx.tree_at(lambda s: s.model.target, state, state.model.online)`.
    """
    seen = {address for other in others for address in _addresses(other)}
    out = []
    for array in arrays:
        addresses = _addresses(array)
        out.append(array if seen.isdisjoint(addresses) else copy_array(array))
        seen.update(addresses)
    return out


def copy_array(array: Array) -> Array:
    """A copy of an array, each shard where it is."""
    return jax.device_put(array, array.sharding, may_alias=False)


def _addresses(array: Any) -> list[int]:
    """The addresses of the shards of an array in this process."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or not array.size:
        return []
    if is_key(array):
        array = jax.random.key_data(array)
    count = len(array.sharding.addressable_devices)
    return [array.addressable_data(i).unsafe_buffer_pointer() for i in range(count)]
