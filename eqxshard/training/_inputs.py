"""The inputs of a compiled step beside its state: the argument that it keeps, and batches.

A step keeps (does not donate) a model to measure, or a teacher; its program depends on the
`Signature` of that. It takes one batch, stacked batches, or rows of a resident dataset,
from which it gathers batches for itself. Each kind of batches is a class with the same
methods, so that steps treat them alike.
"""

import functools as ft
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from .._errors import UsageError, UsageTypeError
from .._jax import Tracer
from ..distributed import allgather_json, spans_processes
from ..sharding._batch_weights import WEIGHT
from ..sharding._leaves import GRAPHS, check_dtypes, check_integers, is_key, leaf_path
from ..sharding._mesh import (
    batch_sharding,
    check_batch_size,
    describe_mesh,
    devices_of,
    format_sharding,
)
from ..sharding._placement import filter_shard
from ..sharding._spec import AnyMesh
from ..transforms._partition import Static, partition
from ._donation import check_not_donated
from .rewrite._interpreter import looks_for_nan


class DeviceBatches(eqx.Module):
    """Batches that a step gathers for itself, from a dataset that is on its devices.

    [`eqxshard.Loader.stacked`][] makes these for `train_step.many` and `eval_step.many`.

    - `examples`: the dataset, whole on each device.
    - `rows`: which examples each step takes.
    - `weight`: how much each of them counts, if the loader pads; otherwise `None`.
    - `count`: the number of steps to take; there is room for `len(rows)`.
    """

    examples: dict[str, Array]
    rows: Int[Array, "steps batch"]
    weight: Float[Array, "steps batch"] | None
    count: Int[Array, ""]

    def batch(self, step: Int[Array, ""], mesh: AnyMesh) -> dict[str, Array]:
        """The batch of one of the steps."""
        rows = self.rows[step]
        batch = {name: jnp.take(x, rows, axis=0) for name, x in self.examples.items()}
        if self.weight is not None:
            weight = self.weight[step]
            if WEIGHT in batch:
                weight = jnp.where(weight == 0, weight, batch[WEIGHT])
            batch[WEIGHT] = weight
        return filter_shard(batch, batch_sharding(mesh))


@dataclass(frozen=True)
class Signature:
    """Everything about an argument, such as a teacher, but the values of its arrays.

    - `static`: the argument without its arrays.
    - `shardings`: where each of its arrays is stored, if that is on a mesh.
    """

    static: Static
    shardings: tuple[NamedSharding | None, ...]

    @staticmethod
    def of(argument: PyTree, name: str) -> tuple[list[Any], "Signature"]:
        """The arrays of an argument, and its signature; `name` is for errors."""
        arrays, static = partition(argument, name)
        return arrays, Signature(static, tuple(map(sharding_on_mesh, arrays)))

    def storage(self) -> PyTree[NamedSharding | None]:
        """`shardings` as a PyTree like the argument itself."""
        return self.static.only(self.shardings)


def sharding_on_mesh(array: Any) -> NamedSharding | None:
    """The sharding of an array that is on a mesh of devices."""
    sharding = getattr(array, "sharding", None)
    on_mesh = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding if on_mesh else None


def check_devices(arrays: list[Any], mesh: AnyMesh, name: str) -> None:
    """Refuse arrays on other devices than those of a step's mesh."""
    devices = devices_of(mesh)
    for array in arrays:
        sharding = sharding_on_mesh(array)
        if sharding is not None:
            theirs: Any = sharding.mesh
            fits, where = [*theirs.devices.flat] == devices, describe_mesh(theirs)
        elif isinstance(array, jax.Array) and not isinstance(array, Tracer):
            fits = not array.committed or array.devices() == {*devices}
            where = ", ".join(sorted(map(str, array.devices())))
        else:
            continue
        if not fits:
            raise UsageError(
                f"the {name} is on {where}, and the step on {describe_mesh(mesh)}; make "
                "both with the same mesh, or place it with filter_shard."
            )


def mesh_of(arrays: list[Any], what: str, remedy: str = "") -> AnyMesh:
    """The mesh that arrays are on."""
    for sharding in map(sharding_on_mesh, arrays):
        if sharding is not None:
            return sharding.mesh  # pyright: ignore[reportReturnType]
    raise UsageError(
        f"the arrays of this {what} are not on a mesh; place them with filter_shard"
        f"{remedy}."
    )


#: The signature of a step that keeps nothing.
NOTHING = Signature.of(None, "nothing")[1]

#: A function from arrays that are carried along, arrays that stay the same, and a batch, to
#: new arrays and a result.
_Step = Callable[[list[Any], list[Any], PyTree], tuple[list[Any], Any]]


class _Batch:
    """One batch, or stacked ones: a PyTree of arrays with the same leading dims.

    - `suffix`: the suffix to the name of a step that takes it, in profiles and compiled
        modules.
    """

    def __init__(self, *leading: str):
        self.suffix = "" if len(leading) == 1 else "s"
        self._leading = leading
        self._stacked = len(leading) > 1

    def check(self, batch: PyTree, mesh: AnyMesh, accumulate: int = 1) -> None:
        """Raise unless a batch has rows that divide, and is where the step takes it."""
        if isinstance(batch, DeviceBatches):
            raise UsageTypeError(
                "Loader.stacked returns batches for several steps; give them to many, or "
                "iterate over the loader."
            )
        count = len(self._leading)
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        shapes = {leaf_path(path): getattr(leaf, "shape", ()) for path, leaf in leaves}
        sizes = {shape[:count] for shape in shapes.values()}
        if len(sizes) != 1 or len(next(iter(sizes))) < count:
            raise UsageError(
                f"the entries of a batch have the shapes {shapes}; give each the same "
                f"leading dims: {', '.join(self._leading)} ({GRAPHS})."
            )
        check_batch_size(next(iter(sizes))[count - 1], mesh, accumulate=accumulate)
        wanted = self.sharding(mesh)
        for path, leaf in leaves:
            kinds = jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic
            if not isinstance(leaf, kinds):
                raise UsageTypeError(
                    f"batch entry {leaf_path(path)} is a {type(leaf).__module__}."
                    f"{type(leaf).__name__}; convert it with numpy.asarray."
                )
            if isinstance(leaf, np.ndarray):
                remedy = "convert it to numbers, or leave it out"
                check_dtypes([(f"batch entry {leaf_path(path)}", leaf)], remedy)
            if is_elsewhere(leaf, wanted):
                raise UsageError(
                    f"batch entry {leaf_path(path)} is sharded as "
                    f"{format_sharding(leaf.sharding)}, and the step takes it as "
                    f"{format_sharding(wanted)}; make the loader with the step's mesh, or "
                    "place it with filter_shard(batch, batch_sharding(mesh))."
                )

    def shapes(self, batch: PyTree, mesh: AnyMesh) -> PyTree:
        """The shapes and types of a batch that a step takes, wherever it is."""
        self.check(batch, mesh)
        wanted = self.sharding(mesh)

        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            type_of: Any = (
                leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
            )
            return jax.ShapeDtypeStruct(
                type_of.shape, type_of.dtype, sharding=wanted, weak_type=type_of.weak_type
            )

        return jax.tree.map(one, batch)

    def program(self, step: str, batch: PyTree) -> str:
        """The name of the program for a batch, whose first compile is expected.

        The name has the sizes that differ by design: the length of a loop, of a dataset.
        """
        if not self._stacked:
            return step
        return f"{step}.many (length {jax.tree.leaves(batch)[0].shape[0]})"

    def sharding(self, mesh: AnyMesh) -> NamedSharding:
        """The sharding that the step takes a batch in."""
        return batch_sharding(mesh, stacked=self._stacked)

    def repeat(self, step: _Step, mesh: AnyMesh) -> _Step:
        """A function that takes a step for each batch, and stacks their results."""
        if not self._stacked:
            return step
        return lambda arrays, kept, batch: jax.lax.scan(
            lambda arrays, batch: step(arrays, kept, batch), arrays, batch
        )


class _Resident:
    """Rows of a dataset on the devices, from which the step gathers batches."""

    suffix = "s"

    def check(self, batch: DeviceBatches, mesh: AnyMesh, accumulate: int = 1) -> None:
        check_batch_size(batch.rows.shape[1], mesh, accumulate=accumulate)
        if isinstance(batch.rows, Tracer):
            return
        sharding = batch.rows.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise UsageError(
                f"the loader's dataset is on {format_sharding(sharding)}, and the step on "
                f"{describe_mesh(mesh)}; make the loader and the step with the same mesh."
            )

    def shapes(self, batch: DeviceBatches, mesh: AnyMesh) -> DeviceBatches:
        return batch

    def program(self, step: str, batch: DeviceBatches) -> str:
        examples = jax.tree.leaves(batch.examples)[0].shape[0]
        return f"{step}.many (length up to {len(batch.rows)}, {examples} examples)"

    def sharding(self, mesh: AnyMesh) -> None:
        return None

    def repeat(self, step: _Step, mesh: AnyMesh) -> _Step:
        # A loop over the steps to take, so that any number of them up to the capacity
        # shares one compiled program.
        def steps(arrays: Any, kept: Any, batch: DeviceBatches) -> tuple[Any, Any]:
            def one(index: Array, arrays: Any) -> tuple[Any, Any]:
                return step(arrays, kept, batch.batch(index, mesh))

            def body(index: Array, loop: tuple[Any, PyTree]) -> tuple[Any, PyTree]:
                arrays, out = one(index, loop[0])
                outs = jax.tree.map(lambda all, x: all.at[index].set(x), loop[1], out)
                return arrays, outs

            capacity = batch.rows.shape[0]
            _, out = jax.eval_shape(one, jnp.int32(0), arrays)
            empty = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), out)
            return jax.lax.fori_loop(jnp.int32(0), batch.count, body, (arrays, empty))

        return steps


StepInput = _Batch | _Resident

ONE_BATCH = _Batch("examples")
STACKED_BATCHES = _Batch("steps", "examples")
RESIDENT_BATCHES = _Resident()


def several_batches(batches: PyTree) -> StepInput:
    """The kind of several batches."""
    return RESIDENT_BATCHES if isinstance(batches, DeviceBatches) else STACKED_BATCHES


def placed(
    kind: StepInput,
    batch: PyTree,
    mesh: AnyMesh,
    wanted: NamedSharding | None,
    accumulate: int = 1,
) -> PyTree:
    """A batch where the step takes it, so that one program serves it wherever it was.

    **Arguments:**

    - `kind`, `batch`, `mesh`, `accumulate`: those of the step.
    - `wanted`: the sharding of the kind on the mesh, which the usual batch has.

    **Raises:**

    `ValueError` if the batch was donated, is committed elsewhere (JAX 0.10 ends the
    process on either), does not divide, or has integers that JAX would wrap.
    """
    ready = True
    leaves, structure = jax.tree.flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            ready = False
        elif leaf.is_deleted():
            check_not_donated(batch, "batch")
        elif leaf.sharding != wanted:
            ready = False
    if ready:
        return batch
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        kind.check(batch, mesh, accumulate)
    if wanted is None:
        return batch
    try:
        _check_host_arrays(batch)
        return jax.tree.unflatten(structure, _place(leaves, wanted))
    except Exception:
        # NumPy arrays are checked only now: it takes as long as placing a small batch.
        kind.check(batch, mesh, accumulate)
        raise


def _place(leaves: list[Any], wanted: NamedSharding) -> list[Array]:
    """The arrays of a batch, on the devices where a step takes them."""
    # Copies of NumPy arrays, which steps read after their calls have returned.
    leaves = [x if isinstance(x, jax.Array) else np.array(x) for x in leaves]
    for leaf in leaves:
        wanted.shard_shape(leaf.shape)  # Raises where XLA would also print.
    is_jit_off = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if wanted.is_fully_addressable and not (is_jit_off or looks_for_nan()):
        # This takes a third of the time of `jax.device_put`, followed by a step.
        return _placing(wanted)(leaves)
    return [
        jax.device_put(x, wanted)
        if isinstance(x, jax.Array) and (x.committed or wanted.is_fully_addressable)
        else jax.make_array_from_callback(x.shape, wanted, np.asarray(x).__getitem__)
        for x in leaves
    ]


@ft.cache
def _placing(wanted: NamedSharding) -> Callable[[list[Any]], list[Array]]:
    def place_batch(leaves: list[Any]) -> list[Array]:
        return leaves

    return jax.jit(place_batch, in_shardings=wanted, out_shardings=wanted)


def _check_host_arrays(batch: PyTree) -> None:
    """Refuse NumPy arrays that JAX would wrap."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    arrays = {leaf_path(path): x for path, x in leaves if isinstance(x, np.ndarray)}
    check_dtypes((f"batch entry {name}", x) for name, x in arrays.items())
    check_integers(arrays, "make them fit")


def check_same(batch: PyTree, mesh: AnyMesh) -> None:
    """Refuse a batch that differs between processes: each must have all of its rows.

    Arrays that are on a mesh have the rows of all processes.
    """
    if not spans_processes(devices_of(mesh)):
        return
    ours = {
        leaf_path(path): hashlib.sha256(np.asarray(x).tobytes()).hexdigest()
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
        if not isinstance(x, jax.Array) or not (x.committed or is_key(x))
    }
    for theirs in allgather_json(ours) if ours else []:
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise UsageError(
                    f"batch entry {name} is not the same array in all processes; "
                    "give each process the whole batch, or make batches with "
                    "eqxshard.Loader, of which each process reads its own rows."
                )


def is_elsewhere(leaf: Any, sharding: NamedSharding) -> TypeGuard[Array]:
    """True if an array is committed to another sharding."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
