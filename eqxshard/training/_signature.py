"""What a compiled function depends on of an argument that it neither trains nor donates."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..sharding._mesh import describe_mesh
from ..transforms._partition import Static, partition


@dataclass(frozen=True)
class Signature:
    """All of an argument but its values, such as of a model to measure, or a teacher.

    - `static`: everything but its arrays.
    - `shardings`: where each of its arrays is stored, if that is on a mesh.
    """

    static: Static
    shardings: tuple[NamedSharding | None, ...]

    @staticmethod
    def of(argument: PyTree, name: str) -> tuple[list[Any], "Signature"]:
        """The arrays of an argument, and its signature; `name` is for errors."""
        arrays, static = partition(argument, name)
        return arrays, Signature(static, tuple(map(sharding_on_mesh, arrays)))

    def check_on(self, mesh: Mesh, name: str) -> None:
        """Refuse arrays on other devices than those of a step's mesh."""
        for sharding in self.shardings:
            # `sharding_on_mesh` lets no others through.
            theirs: Any = sharding and sharding.mesh
            if theirs and [*theirs.devices.flat] != [*mesh.devices.flat]:
                raise ValueError(
                    f"the {name} is on {describe_mesh(theirs)}, and the step on "
                    f"{describe_mesh(mesh)}; make both with the same mesh."
                )

    def storage(self) -> PyTree[NamedSharding | None]:
        """`shardings` as a PyTree like the argument itself."""
        return self.static.only(self.shardings)


def sharding_on_mesh(array: Any) -> NamedSharding | None:
    """The sharding of an array that is on a mesh of devices."""
    sharding = getattr(array, "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if on_mesh else None


def mesh_of(arrays: list[Any], what: str, remedy: str = "") -> Mesh:
    """The mesh that arrays are on."""
    for sharding in map(sharding_on_mesh, arrays):
        if sharding is not None:
            return sharding.mesh  # pyright: ignore[reportReturnType]
    raise ValueError(
        f"the arrays of this {what} are not on a mesh; place them with filter_shard"
        f"{remedy}."
    )
