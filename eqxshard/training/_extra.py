"""What a loss function gets besides the model and the batch, such as a teacher."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from ..sharding._leaves import is_array, is_key
from ..transforms._partition import Static, partition


def stored_shardings(tree: PyTree) -> PyTree[NamedSharding | None]:
    """The sharding of each array of a PyTree that is on a mesh; `None` for other leaves."""

    def stored(leaf: Any) -> NamedSharding | None:
        sharding = getattr(leaf, "sharding", None) if is_array(leaf) else None
        on_mesh = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
        return sharding if on_mesh else None

    return jax.tree.map(stored, tree)


@dataclass(frozen=True)
class Extra:
    """The structure of a step's `extra`: the part of it that a compiled step depends on.

    - `static`: everything but its arrays.
    - `shardings`: where each of its arrays is stored, if that is on a mesh.
    """

    static: Static
    shardings: tuple[NamedSharding | None, ...]

    @staticmethod
    def of(extra: PyTree) -> tuple[list[Any], "Extra | None"]:
        """The arrays of an `extra`, and its structure; nothing of `None`."""
        if extra is None:
            return [], None
        arrays, static = partition(extra, "extra")
        return arrays, Extra(static, tuple(stored_shardings(arrays)))

    def storage(self) -> PyTree[NamedSharding | None]:
        """`shardings` as a PyTree like the `extra` itself."""
        return self.static.only(self.shardings)


def copy_taken(arrays: list[Array], taken: Sequence[Any]) -> list[Array]:
    """Copy those of a state's arrays that are also in `taken`, and must not be donated.

    Such as after `target = state.model`, until the next step has replaced the state's.
    """
    ids = {*map(id, taken)}
    return [copy_array(array) if id(array) in ids else array for array in arrays]


def copy_array(array: Array) -> Array:
    """A copy of an array, each shard where it is."""
    return jax.device_put(array, array.sharding, may_alias=False)


def check_not_donated(extra: Sequence[Any]) -> None:
    """Refuse arrays that a step took with an earlier state: JAX 0.10 segfaults on them."""
    if any(x.is_deleted() for x in extra if isinstance(x, jax.Array)):
        raise ValueError(
            "the extra was a part of an earlier state, which was donated; take it from the "
            "newest state, or copy its arrays."
        )


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
