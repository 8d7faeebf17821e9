"""The device mesh: which devices, in what order, along which axes."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._errors import UsageError, UsageTypeError
from ..distributed import assert_same_on_all_processes, spans_processes
from ._spec import AXES, AnyMesh, axis_sizes, format_sizes
from ._text import comma_list, count_devices, did_you_mean, format_mesh, nearest_multiples

#: The axes that the rows of a batch are split over, where a mesh has them.
_BATCH_AXES = ["data", "fsdp"]


def make_mesh(
    *,
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    stage: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
    dcn: Mapping[str, int] | None = None,
    explicit: bool | Sequence[str] = False,
    **unknown: int,
) -> Mesh:
    """Arrange devices in a mesh with six named axes.

    All six axes exist on every mesh, with size 1 where they are not used. Neighbours
    along the last axis, `tensor`, share the fastest links, where the platform knows them.

    **Arguments:**

    - `data`, `fsdp`, `tensor`, `context`, `expert`, `stage`: the number of devices along
        each axis. At most one of them may be `-1`: it takes the devices that are left. By
        default, `data` does.
    - `unknown`: any other axis, which is refused.
    - `devices`: the devices to use, all of [`jax.devices`][] by default.
    - `dcn`: for each axis that crosses hosts, how many it crosses, such as `{"data": 4}`
        on four hosts, or on four TPU slices of one host or several. The axis keeps its
        full size; all other axes stay inside a host or slice. (A *hybrid mesh*.)
    - `explicit`: the axes that are `AxisType.Explicit`: `True` for all, or their names.

    **Returns:**

    A `jax.sharding.Mesh`. On axes that are `AxisType.Auto`, as all are by default,
    computation follows data, and any model works unchanged. On Explicit axes, which are
    the default of `jax.make_mesh`, models and loss functions see arrays whose types say
    how they are split, and JAX refuses what is ambiguous.

    **Raises:**

    `ValueError` if a size is not positive, the sizes do not multiply to the number of
    devices, `explicit` or `dcn` names an unknown axis, `dcn` does not fit the hosts and
    slices, or the processes ask for different meshes; `TypeError` for another axis.

    !!! Example

        ```python
        mesh = eqxshard.make_mesh(data=2, fsdp=4)  # 8 devices: hybrid FSDP
        mesh = eqxshard.make_mesh(tensor=2)  # the rest is data parallel
        ```
    """
    for axis in unknown:
        raise UsageTypeError(no_such_axis(axis))
    if data is None:
        data = 1 if -1 in (fsdp, tensor, context, expert, stage) else -1
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise UsageError("devices is empty; give at least one, or leave it out for all.")
    asked = dict(
        stage=stage, data=data, fsdp=fsdp, context=context, expert=expert, tensor=tensor
    )
    if spans_processes(devices):
        facts = {**asked, "dcn": dcn and dict(dcn), "devices": len(devices)}
        assert_same_on_all_processes("mesh", facts)
    sizes = resolve_sizes(asked, len(devices))
    shape = tuple(sizes[axis] for axis in AXES)
    types = axis_types(explicit)
    if dcn is None:
        return jax.make_mesh(shape, AXES, devices=devices, axis_types=types)
    across = _across_hosts(sizes, dcn)
    within = tuple(size // n for size, n in zip(shape, across))
    grid = mesh_utils.create_hybrid_device_mesh(
        within,
        across,
        devices,
        process_is_granule=_granule(devices, dcn) == "process_index",
    )
    return Mesh(grid, AXES, axis_types=types)


def no_such_axis(axis: str) -> str:
    """The text of an error about an axis that `make_mesh` does not have."""
    hint = did_you_mean(axis, AXES)
    return f"there is no mesh axis {axis!r}; {hint}the axes are {comma_list(AXES)}."


def axis_types(explicit: bool | Sequence[str]) -> tuple[AxisType, ...]:
    """The type of each axis of a mesh, given those that are Explicit."""
    if isinstance(explicit, bool):
        explicit = AXES if explicit else ()
    names = (explicit,) if isinstance(explicit, str) else explicit
    for axis in names:
        if axis not in AXES:
            raise UsageError(f"explicit={explicit!r}: {no_such_axis(axis)}")
    return tuple(AxisType.Explicit if a in names else AxisType.Auto for a in AXES)


def name_batch_axes(mesh: Mesh, batch_axes: Sequence[str]) -> Mesh:
    """Say which axes of a mesh split the batch, if they are not called `data` and `fsdp`.

    Call it once in each process: it holds for every mesh with axes of these names.

    **Arguments:**

    - `mesh`: a mesh of your own.
    - `batch_axes`: those of its axes that the rows of a batch are split over. Parameters
        that a rule splits over one of them are gathered for use, as under FSDP.

    **Returns:**

    The mesh.

    **Raises:**

    `ValueError` if the mesh does not have one of the axes; `TypeError` if it is not a mesh.

    !!! Example

        ```python
        mesh = jax.make_mesh((2, 4), ("dp", "shard"))
        mesh = eqxshard.sharding.name_batch_axes(mesh, ("dp", "shard"))
        rule = eqxshard.fsdp(axis="shard")
        ```
    """
    check_is_mesh(mesh)
    axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    for axis in axes:
        if axis not in mesh.axis_names:
            raise UsageError(
                f"batch_axes={axes} names the axis {axis!r}, which the mesh does not have; "
                f"its axes are {comma_list(mesh.axis_names)}."
            )
    _BATCH_AXES.extend(axis for axis in axes if axis not in _BATCH_AXES)
    return mesh


def batch_axes(mesh: AnyMesh | Mapping[str, int]) -> tuple[str, ...]:
    """The axes that the rows of a batch are split over, of a mesh or of its sizes."""
    names = mesh if isinstance(mesh, Mapping) else mesh.axis_names
    return tuple(axis for axis in names if axis in _BATCH_AXES)


def batch_sharding(mesh: AnyMesh, *, stacked: bool = False) -> NamedSharding:
    """The sharding of a batch: rows split over the axes of the batch, `data` and `fsdp`.

    **Arguments:**

    - `mesh`: from [`eqxshard.make_mesh`][], or your own.
    - `stacked`: whether the rows are the second dim, after one of stacked batches.

    **Returns:**

    A `NamedSharding` for arrays with at least these dims; it splits no others.
    """
    rows = batch_axes(mesh) or None
    return NamedSharding(mesh, PartitionSpec(*[None] * stacked, rows))


def check_is_mesh(mesh: Any) -> None:
    """Raise `TypeError` for a text, an abstract mesh, or anything else than a mesh."""
    if isinstance(mesh, AbstractMesh):
        raise UsageTypeError(
            f"mesh={mesh!r} has no devices; make one that has, with eqxshard.make_mesh."
        )
    if not isinstance(mesh, Mesh):
        raise UsageTypeError(
            f"mesh={mesh!r} is not a mesh; make it with eqxshard.make_mesh, or from text "
            "with eqxshard.run.mesh_from_text."
        )


def check_mesh(mesh: AnyMesh) -> None:
    """Raise unless this is a mesh, and it is known which of its axes split the batch.

    An abstract mesh must have an `abstract_device`, which says what it is for.
    """
    if isinstance(mesh, AbstractMesh):
        platform_of(mesh)
    else:
        check_is_mesh(mesh)
    if AxisType.Manual in mesh.axis_types:
        raise UsageError(
            f"the mesh has the axis types {mesh.axis_types}, and Manual axes are for "
            "jax.shard_map; give Auto or Explicit ones."
        )
    if not batch_axes(mesh) and not {*mesh.axis_names} <= {*AXES}:
        raise UsageError(
            f"the mesh has the axes {comma_list(mesh.axis_names)}, and none is called data "
            "or fsdp; say which split the batch, with "
            "eqxshard.sharding.name_batch_axes(mesh, batch_axes=(...))."
        )


def platform_of(mesh: AnyMesh) -> str:
    """The platform of the devices of a mesh, or of those that an abstract mesh is for.

    **Raises:**

    `ValueError` if an abstract mesh does not say it.
    """
    device = mesh.abstract_mesh.abstract_device
    if device is None:
        raise UsageError(
            f"mesh={mesh!r} does not say for which devices it is; give "
            "jax.sharding.AbstractMesh an abstract_device=."
        )
    return device.platform


def is_on_cpus(mesh: AnyMesh) -> bool:
    """True if the devices of a mesh are CPUs."""
    return platform_of(mesh) == "cpu"


def devices_of(mesh: AnyMesh) -> list[Any]:
    """The devices of a mesh, in its order; none of an abstract one."""
    return [] if isinstance(mesh, AbstractMesh) else [*mesh.devices.flat]


def check_batch_size(batch_size: int, mesh: AnyMesh, *, accumulate: int = 1) -> None:
    """Raise `ValueError` unless each microbatch divides over the mesh's batch axes."""
    sizes = axis_sizes(batch_axes(mesh), mesh)
    devices = math.prod(sizes.values())
    parts = devices * accumulate
    if batch_size < 1:
        raise UsageError(
            f"batch size {batch_size} is not positive; use a multiple of {parts}."
        )
    if batch_size % parts:
        each = f", each with accumulate={accumulate} parts" if accumulate > 1 else ""
        raise UsageError(
            f"batch size {batch_size} does not divide over {format_sizes(sizes)} = "
            f"{count_devices(devices)}{each}; use a multiple of {parts}, such as "
            f"{nearest_multiples(batch_size, parts)}."
        )


def describe_mesh(mesh: AnyMesh) -> str:
    """A mesh in one line: `8 x cpu (data=4, fsdp=2)`.

    **Arguments:**

    - `mesh`: from [`eqxshard.make_mesh`][].

    **Returns:**

    The number of devices, their platform, and the axes that are larger than 1.

    **Raises:**

    `ValueError` if an abstract mesh does not say for which devices it is.
    """
    sizes = format_mesh(used_axes(mesh.shape))
    return f"{mesh.size} x {platform_of(mesh)} ({sizes})"


def used_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes that are larger than 1; `data=1` on one device."""
    return {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}


def format_sharding(sharding: Any) -> str:
    """A sharding as errors show it: `P('fsdp',) on 8 x cpu (fsdp=8)`."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return str(sharding)
    return f"{sharding.spec} on {describe_mesh(sharding.mesh)}"


def automatic_axes(axes: Sequence[str], *sizes: int) -> tuple[str, ...]:
    """The axes, of those given, of the mesh in context that are left to the compiler.

    There are none if one of `sizes` does not divide over them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = [axis for axis in axes if axis in mesh.auto_axes]
    count = math.prod(mesh.shape[axis] for axis in auto)
    return () if any(size % count for size in sizes) else tuple(auto)


def resolve_sizes(asked: dict[str, int], count: int) -> dict[str, int]:
    """Replace -1 by the remaining devices; check that the product is `count`."""
    for axis, size in asked.items():
        if not isinstance(size, int | np.integer) or (size < 1 and size != -1):
            raise UsageError(
                f"axis {axis}={size!r} must be at least 1; give a size, or -1 for what "
                "is left."
            )
    rest = [axis for axis, size in asked.items() if size == -1]
    if len(rest) > 1:
        raise UsageError(
            f"{' and '.join(rest)} are both -1, and only one axis can take what is left; "
            "give the other a size."
        )
    fixed = {axis: size for axis, size in asked.items() if size != -1}
    product = math.prod(fixed.values())
    if rest and count % product == 0:
        return asked | {rest[0]: count // product}
    if not rest and count == product:
        return asked
    sizes = used_axes(fixed)
    terms = format_sizes(sizes) + (f" = {product}" if len(sizes) > 1 else "")
    fits = "divides" if rest else "is"
    raise UsageError(
        f"mesh {terms} does not fit the {count_devices(count)}; choose sizes whose "
        f"product {fits} {count}, set one axis to -1, or use another number of devices."
    )


def _granule(devices: Sequence[Any], dcn: Mapping[str, int]) -> str:
    """The attribute of devices that `dcn` counts: that of slices, or else of processes."""
    counts = {
        name: Counter(getattr(device, name, None) for device in devices)
        for name in ("slice_index", "process_index")
    }
    asked = math.prod(dcn.values())
    for name, granules in counts.items():
        known = None not in granules
        if known and len(granules) == asked and len({*granules.values()}) == 1:
            return name
    raise UsageError(
        f"dcn={dict(dcn)} asks for {asked} hosts or slices of equal size, but the devices "
        f"belong to {len(counts['process_index'])} and {len(counts['slice_index'])}; make "
        "the product of dcn equal to one of these."
    )


def _across_hosts(sizes: Mapping[str, int], dcn: Mapping[str, int]) -> tuple[int, ...]:
    for axis, n in dcn.items():
        size = sizes.get(axis, 0)
        if not isinstance(n, int | np.integer) or not 1 <= n <= size or size % n:
            raise UsageError(
                f"dcn={{{axis!r}: {n!r}}} does not divide an axis of the mesh, "
                f"{format_mesh(sizes)}; give an axis, and a divisor of its size."
            )
    return tuple(dcn.get(axis, 1) for axis in AXES)
