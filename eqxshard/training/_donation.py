"""Arrays that steps donate, and copies of those that something else needs too."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ..sharding._leaves import is_key


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
        raise ValueError(
            "this state was donated to an earlier step, and its model with it; use the "
            "state that the step returned."
        )


def check_not_donated(tree: PyTree, name: str) -> None:
    """Refuse another argument that a step has taken: JAX 0.10 segfaults on it."""
    if any_donated(jax.tree.leaves(tree)):
        raise ValueError(
            f"an array of the {name} was donated to an earlier call, or deleted; take it "
            "from the newest state, or copy it before it is donated."
        )


def copy_taken(arrays: list[Any], taken: Sequence[Any]) -> list[Any]:
    """Copy those of a state's arrays that are also in `taken`, and must not be donated.

    Such as after `target = state.model`, until the next step has replaced the state's.
    """
    ids = {*map(id, taken)}
    if ids.isdisjoint(map(id, arrays)):
        return arrays
    return [copy_array(array) if id(array) in ids else array for array in arrays]


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
        if array.size:
            plain = jax.random.key_data(array) if is_key(array) else array
            address = plain.addressable_shards[0].data.unsafe_buffer_pointer()
            if address in seen:
                array = copy_array(array)
            seen.add(address)
        out.append(array)
    return out
