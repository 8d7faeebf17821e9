"""`PartitionSpec`s: the mesh axes in them, and the check that one fits an array."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._errors import UsageError
from ._text import comma_list, did_you_mean

#: The axes of `make_mesh`, slowest link first. On a mesh with some of them, the others
#: count as axes of size 1, so a rule written once is valid on all these meshes.
AXES = ("stage", "data", "fsdp", "context", "expert", "tensor")

#: A mesh of devices, or one without them.
AnyMesh = Mesh | AbstractMesh

#: The mesh axis or axes that split one dim, the first over the largest blocks.
Axes = str | tuple[str, ...]


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a spec names, in its order."""
    return tuple(axis for entry in spec for axis in axes_of(entry))


def axis_sizes(axes: Iterable[str], mesh: AnyMesh) -> dict[str, int]:
    """The sizes of some axes: 1 for those that the mesh does not have."""
    return {axis: mesh.shape.get(axis, 1) for axis in axes}


def spec_on(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
    """A spec without the axes that the mesh does not have, which split nothing."""
    if all(axis in mesh.shape for axis in spec_axes(spec)):
        return spec
    return PartitionSpec(*[only(entry, mesh.shape.__contains__) for entry in spec])


def only(entry: Any, keep: Callable[[str], bool]) -> Any:
    """An entry of a spec with only those of its axes that `keep` accepts."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    return tuple(axis for axis in axes_of(entry) if keep(axis)) or None


def make_spec(entries: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """The spec with these axes for each dim, in its shortest form."""
    plain = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
    while plain and plain[-1] is None:
        plain.pop()
    return PartitionSpec(*plain)


def format_spec(spec: PartitionSpec) -> str:
    """A spec as one writes it: `P(('data', 'fsdp'), None, 'tensor')`."""
    return f"P({', '.join(map(repr, spec))})"


def check_axis(axis: str, mesh: AnyMesh, where: str) -> None:
    """Raise `ValueError` unless the mesh has the axis.

    A mesh with no other axes than those of `make_mesh` counts as having all of them.
    """
    is_ours = {*mesh.axis_names} <= {*AXES}
    if axis not in mesh.shape and not (is_ours and axis in AXES):
        raise UsageError(
            f"{where} names the axis {axis!r}, which the mesh does not have; "
            f"{did_you_mean(axis, mesh.axis_names)}its axes are "
            f"{comma_list(mesh.axis_names)}."
        )


def check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: AnyMesh
) -> None:
    """Raise `ValueError` unless a spec fits an array and a mesh."""
    where = f"{path or 'the array'} {shape}: {spec}"
    if len(spec) > len(shape):
        raise UsageError(
            f"{where} has {len(spec)} entries and the array {len(shape)} dims; give at "
            "most one entry per dim."
        )
    seen: set[str] = set()
    for dim, entry in enumerate(spec):
        axes = axes_of(entry)
        for axis in axes:
            check_axis(axis, mesh, where)
            if axis in seen:
                raise UsageError(
                    f"{where} uses the axis {axis!r} twice; an axis can split one dim only."
                )
            seen.add(axis)
        sizes = axis_sizes(axes, mesh)
        parts = math.prod(sizes.values())
        if shape[dim] % parts:
            sizes = format_sizes(sizes)
            raise UsageError(
                f"{where} splits dim {dim} of size {shape[dim]} over {sizes}, which does "
                f"not divide it; choose a dim that is a multiple of {parts}, or do not "
                "split this one."
            )


def format_sizes(sizes: dict[str, int]) -> str:
    """Axes and their sizes: `data=2 x fsdp=4`."""
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())
