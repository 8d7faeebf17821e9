"""Arguments of a step that are not donated, such as a model to measure, or a teacher."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from ..sharding._leaves import is_key
from ..sharding._mesh import describe_mesh
from ..transforms._partition import Static, partition

DONATED = (
    "this state was donated to an earlier step, and its model with it; use the state that "
    "the step returned."
)


@dataclass(frozen=True)
class Signature:
    """The part of an argument that a compiled function depends on: all but its values.

    - `static`: everything but its arrays.
    - `shardings`: where each of its arrays is stored, if that is on a mesh.
    """

    static: Static
    shardings: tuple[NamedSharding | None, ...]

    @staticmethod
    def of(argument: PyTree, name: str) -> tuple[list[Any], "Signature"]:
        """The arrays of an argument, and its signature; `name` is for errors."""
        arrays, static = partition(argument, name)
        return arrays, Signature(static, tuple(map(_sharding_on_mesh, arrays)))

    def check_on(self, mesh: Mesh, name: str) -> None:
        """Refuse arrays on other devices than those of a step's mesh."""
        for sharding in self.shardings:
            # `_sharding_on_mesh` lets no others through.
            theirs: Any = sharding and sharding.mesh
            if theirs and [*theirs.devices.flat] != [*mesh.devices.flat]:
                raise ValueError(
                    f"the {name} is on {describe_mesh(theirs)}, and the step on "
                    f"{describe_mesh(mesh)}; make both with the same mesh."
                )

    def storage(self) -> PyTree[NamedSharding | None]:
        """`shardings` as a PyTree like the argument itself."""
        return self.static.only(self.shardings)


def _sharding_on_mesh(array: Any) -> NamedSharding | None:
    sharding = getattr(array, "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if on_mesh else None


def take_extra(extra: PyTree) -> tuple[list[Any], Signature | None]:
    """The arrays of a step's `extra`, and its signature; nothing of `None`."""
    return ([], None) if extra is None else Signature.of(extra, "extra")


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


def any_donated(arrays: Iterable[Any]) -> bool:
    """Whether a step has taken one of some arrays."""
    for array in arrays:
        if isinstance(array, Tracer):
            continue
        if isinstance(array, jax.Array) and array.is_deleted():
            return True
    return False


def check_not_donated(extra: Sequence[Any]) -> None:
    """Refuse arrays that a step took with an earlier state: JAX 0.10 segfaults on them."""
    if any_donated(extra):
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
