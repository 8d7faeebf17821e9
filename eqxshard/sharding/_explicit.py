"""Explicit axes: meshes on which the type of an array says how it is split.

User code sees the axes as the mesh has them. The rest of a step runs on Auto axes, where
the compiler decides whatever no constraint says: `to_auto` removes the shardings from the
types of arrays, and `to_explicit` adds them. Neither moves data.
"""

import contextlib
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ._leaves import as_weak_as, is_array, is_key
from ._spec import AnyMesh, axes_of


def is_explicit(mesh: AnyMesh) -> bool:
    """True if some axes of a mesh are Explicit."""
    return AxisType.Explicit in mesh.axis_types


def auto_mesh(mesh: Any) -> Any:
    """The same mesh, with Auto axes in place of Explicit ones."""
    if not is_explicit(mesh):
        return mesh
    types = tuple(
        AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types
    )
    return mesh.update(axis_types=types)


def auto_sharding(sharding: NamedSharding) -> NamedSharding:
    """A sharding on the same mesh with Auto axes."""
    if not is_explicit(sharding.mesh):
        return sharding
    mesh = auto_mesh(sharding.mesh)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def explicit_part(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
    """The part of a spec over the Explicit axes of a mesh, as the type of an array has it.

    Axes of size 1 split nothing, and are left out: JAX would call the product of two
    arrays ambiguous if both had such an axis in the dim that is summed over.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    named = {x for x in types if types[x] is AxisType.Explicit and mesh.shape[x] > 1}
    kept = [tuple(axis for axis in axes_of(entry) if axis in named) for entry in spec]
    return PartitionSpec(*[axes or None for axes in kept])


def _type_mesh(x: Any) -> AbstractMesh:
    """The mesh in the type of an array; empty if it has none."""
    return jax.typeof(x).sharding.mesh


def computing_on_auto(mesh: Any) -> Any:
    """A context in which the axes of a mesh are Auto, if some are Explicit."""
    if not is_explicit(mesh):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(auto_mesh(mesh.abstract_mesh))


def user_axes(mesh: Any) -> Any:
    """A context with the axes of a mesh as they are, if some are Explicit."""
    if not is_explicit(mesh):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def no_explicit_context() -> Any:
    """Outside jit: a context in which the mesh of `jax.set_mesh`, if any, has Auto axes."""
    mesh = jax.sharding.get_mesh()
    return jax.set_mesh(auto_mesh(mesh)) if is_explicit(mesh) else contextlib.nullcontext()


def to_auto(tree: PyTree) -> PyTree:
    """Inside jit: arrays whose types do not say how they are split."""

    def one(x: Any) -> Any:
        if not is_array(x) or not is_explicit(_type_mesh(x)):
            return x
        with jax.sharding.use_abstract_mesh(auto_mesh(_type_mesh(x))):
            return jax.sharding.reshard(x, PartitionSpec())

    return jax.tree.map(one, tree)


def to_explicit(x: Any, sharding: NamedSharding) -> Array:
    """Inside jit: an array whose type says how it is split, as far as axes are Explicit.

    **Arguments:**

    - `x`: an array that is already split in this way.
    - `sharding`: how it is split.
    """
    mesh: Any = sharding.mesh
    if not is_explicit(mesh):
        return x
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.sharding.reshard(x, explicit_part(sharding.spec, mesh))


def with_types(x: Array, sharding: NamedSharding) -> Array:
    """Outside jit: an array under a sharding that differs from its own in types of axes."""
    if x.sharding == sharding:
        return x
    if is_key(x):
        data = with_types(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    shards = [shard.data for shard in x.addressable_shards]
    typed = jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
    return as_weak_as(typed, x)


def replicated_on(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Inside jit: arrays as `to_explicit` returns them, whole along Explicit axes."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: to_explicit(x, whole) if is_array(x) else x, tree)


def constrain_to(x: Any, sharding: Any) -> Array:
    """Inside jit: constrain an array, whatever its type and the axes of the mesh.

    `jax.lax.with_sharding_constraint` is for Auto axes, `jax.sharding.reshard` for
    Explicit ones. A `PartitionSpec` is on the mesh in context.
    """
    mesh = _type_mesh(x)
    if not is_explicit(mesh):
        if isinstance(sharding, NamedSharding):
            sharding = auto_sharding(sharding)
        return jax.lax.with_sharding_constraint(x, sharding)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    entries = [*spec] + [None] * (x.ndim - len(spec))
    if PartitionSpec.UNCONSTRAINED in entries:
        types = [*jax.typeof(x).sharding.spec]
        types = zip(entries, types, strict=True)
        entries = [
            theirs if entry is PartitionSpec.UNCONSTRAINED else entry
            for entry, theirs in types
        ]
    part = explicit_part(PartitionSpec(*entries), mesh)
    x = jax.sharding.reshard(x, NamedSharding(mesh, part))
    names = {*mesh.auto_axes}
    rest = [tuple(axis for axis in axes_of(entry) if axis in names) for entry in spec]
    if any(rest):
        x = jax.lax.with_sharding_constraint(
            x, PartitionSpec(*[axes or PartitionSpec.UNCONSTRAINED for axes in rest])
        )
    return x


def on_auto_axes(like: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function see Auto axes, whatever the mesh in context.

    **Arguments:**

    - `like`: the name of an argument. The results are split like its first dims.
    """

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        bind = inspect.signature(fn).bind

        @ft.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            mesh = jax.sharding.get_abstract_mesh()
            if not is_explicit(mesh):
                return fn(*args, **kwargs)
            spec = jax.typeof(bind(*args, **kwargs).arguments[like]).sharding.spec
            args, kwargs = to_auto((args, kwargs))
            with jax.sharding.use_abstract_mesh(auto_mesh(mesh)):
                out = fn(*args, **kwargs)
            with jax.sharding.use_abstract_mesh(mesh):
                return jax.tree.map(
                    lambda x: jax.sharding.reshard(x, PartitionSpec(*spec[: x.ndim])), out
                )

        return wrapper

    return decorate
