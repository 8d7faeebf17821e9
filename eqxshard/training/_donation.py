"""Arrays that steps donate, and copies of those that something else needs too."""

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._errors import UsageError
from .._jax import Tracer
from ..sharding._leaves import is_key

_TYPE, _DTYPE = operator.attrgetter("shape", "dtype"), operator.attrgetter("dtype")
#: The dtype of the data of keys.
_BITS = np.dtype(np.uint32)


def any_donated(arrays: Iterable[Any]) -> bool:
    """Whether a step has taken one of some arrays."""
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


def copy_taken(arrays: list[Any], taken: Sequence[Any]) -> list[Any]:
    """Copy those of a state's arrays whose memory `taken` has too: it must not be donated.

    Such as after `target = state.model`, until the next step has replaced the state's; or
    after `jax.device_put` of that, which makes other arrays of the same memory.
    """
    # Addresses are slow to read. Arrays of the same memory have the same type, but for keys
    # and their data.
    kinds = {*map(_TYPE, arrays)}
    try:
        types = {*map(_DTYPE, arrays), *map(_DTYPE, taken)}
        if kinds.isdisjoint(map(_TYPE, taken)) and _BITS not in types:
            return arrays
    except AttributeError:  # Other entries than arrays, which are refused later.
        return arrays
    kinds = {*map(_kind, arrays)} & {*map(_kind, taken)}

    def addresses(array: Any) -> list[int]:
        return _addresses(array) if _kind(array) in kinds else []

    found = {address for x in taken for address in addresses(x)}
    return [x if found.isdisjoint(addresses(x)) else copy_array(x) for x in arrays]


class Separate:
    """Remembers arrays beside a state that have none of its memory.

    Arrays that were there before a step have none of the memory that it returns.
    """

    def __init__(self):
        self._others: list[Any] = []
        #: A weak reference to the first array that the last step returned.
        self._first: Any = None

    def knows(self, arrays: Sequence[Any], others: Sequence[Any]) -> bool:
        """True if these others were there when a step returned these arrays."""
        if self._first is None or self._first() is not arrays[0]:
            return False
        known = [ref() for ref in self._others]
        return [*map(id, known)] == [id(x) for x in others if isinstance(x, jax.Array)]

    def returned(self, arrays: Sequence[Any], others: Sequence[Any]) -> None:
        """Remember that a step has returned these arrays, with these others beside it."""
        self._first = weakref.ref(arrays[0])
        self._others = [weakref.ref(x) for x in others if isinstance(x, jax.Array)]


def copy_array(array: Array) -> Array:
    """A copy of an array, each shard where it is."""
    return jax.device_put(array, array.sharding, may_alias=False)


def copy_shared(arrays: list[Array]) -> list[Array]:
    """Copy arrays whose memory another array of the list has, which donates it.

    Such as after `eqx.tree_at(lambda s: s.model.target, state, state.model.online)`.
    """
    seen: set[int] = set()
    out = []
    for array in arrays:
        addresses = _addresses(array)
        out.append(array if seen.isdisjoint(addresses) else copy_array(array))
        seen.update(addresses)
    return out


def _kind(array: Any) -> tuple[Any, ...]:
    """The type of an array, which is one for all keys and what may be their data."""
    is_bits = not isinstance(array.dtype, np.dtype) or array.dtype == _BITS
    return ("bits",) if is_bits else _TYPE(array)


def _addresses(array: Any) -> list[int]:
    """The addresses of the shards of an array in this process."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or not array.size:
        return []
    if is_key(array):
        array = jax.random.key_data(array)
    count = len(array.sharding.addressable_devices)
    return [array.addressable_data(i).unsafe_buffer_pointer() for i in range(count)]
