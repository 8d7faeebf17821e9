"""`filter_shard_map`: `jax.shard_map` with Equinox's filtering."""

import functools as ft
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from .._errors import UsageError, UsageTypeError
from ..sharding._leaves import is_array, leaf_path
from ..sharding._spec import check_axis, check_spec, spec_axes

_T = TypeVar("_T")


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class _FilterShardMap:
    """The function that [`eqxshard.filter_shard_map`][] returns.

    It is a PyTree, so that the arrays of `fn` can be traced.
    """

    fn: Any
    mesh: Any
    in_specs: Any
    out_specs: Any
    axis_names: Any
    check_vma: Any

    def __call__(self, /, *args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if mesh.empty:
            raise UsageError(
                "filter_shard_map has no mesh; give it one, or call it under jax.set_mesh."
            )
        self._check(args, mesh)
        arrays, static = eqx.partition((self.fn, args), eqx.is_array)
        static_out: PyTree = None

        def per_device(arrays: PyTree) -> PyTree:
            nonlocal static_out
            fn, args = eqx.combine(arrays, static)
            out = fn(*args)
            _broadcast_specs(self.out_specs, out, "out_specs", "result")
            arrays_out, static_out = eqx.partition(out, eqx.is_array)
            return arrays_out

        # The name in profiles and JAX's errors.
        per_device.__name__ = getattr(self.fn, "__name__", type(self.fn).__name__)
        arrays_out = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=((PartitionSpec(), self.in_specs),),
            out_specs=self.out_specs,
            axis_names=self.axis_names,
            check_vma=self.check_vma,
        )(arrays)
        return eqx.combine(arrays_out, static_out)

    def _check(self, args: tuple[Any, ...], mesh: Mesh | AbstractMesh) -> None:
        if isinstance(self.in_specs, tuple) and len(self.in_specs) != len(args):
            raise UsageError(
                f"in_specs has {len(self.in_specs)} entries for {len(args)} positional "
                "arguments; give one for each, or one PartitionSpec for all."
            )
        for path, leaf, spec in _broadcast_specs(self.in_specs, args, "in_specs", "args"):
            check_spec(path, leaf.shape, spec, mesh)
        _check_all_specs(self.out_specs, "out_specs")
        used = {a for spec in jax.tree.leaves(self.out_specs) for a in spec_axes(spec)}
        for axis in (*self.axis_names, *used):
            check_axis(axis, mesh, "filter_shard_map")


def filter_shard_map(
    fn: Callable[..., _T],
    mesh: Mesh | AbstractMesh | None,
    in_specs: PartitionSpec | tuple[PyTree, ...],
    out_specs: PyTree,
    *,
    axis_names: Set[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., _T]:
    """Run a function on every device, each with its own part of the arrays.

    Like [`jax.shard_map`][], for PyTrees of anything: arrays are split and reassembled;
    everything else (functions, strings, numbers, `None`) is static, the same on every
    device, and passes through unchanged in both directions. Inside `fn`, devices
    communicate by the collectives of `jax.lax`.

    Like JAX's, it compiles nothing by itself: call it inside [`eqxshard.filter_jit`][].

    **Arguments:**

    - `fn`: a function of positional arguments, which gets and returns one device's part
        of each. It may itself be a module or a bound method: every device has its arrays
        whole.
    - `mesh`: from [`eqxshard.make_mesh`][]; `None` for the mesh in context, which inside
        a step is the step's.
    - `in_specs`: how the arguments are split: a `PartitionSpec` for all, or a tuple with
        an entry for each, itself a `PartitionSpec` or a PyTree of them that is a prefix
        of the argument. Use `None` for an argument without arrays.
    - `out_specs`: how the results are reassembled: a `PartitionSpec`, or a PyTree of
        them that is a prefix of the result. Along axes that a spec does not name, all
        devices must return the same.
    - `axis_names`: the mesh axes along which `fn` runs per device; the others are left to
        the compiler, as outside. All axes if it is empty.
    - `check_vma`: whether JAX checks that results are equal where `out_specs` says so,
        and uses that to derive gradients (*varying manual axes*).

    **Returns:**

    A function like `fn`, of whole arrays. It is a PyTree that holds `fn`.

    **Raises:**

    When called, `ValueError` if `in_specs` does not have one entry per argument, specs
    are not a prefix of their PyTree, or a spec does not fit its array as for
    [`eqxshard.shardings`][]; `TypeError` if something is not a spec.

    !!! Example

        ```python
        def mean(model, x):
            return jax.lax.pmean(jnp.mean(jax.vmap(model)(x), axis=0), "data")

        mean = eqxshard.filter_shard_map(mean, mesh, (P(), P("data")), P())
        y = eqxshard.filter_jit(mean)(model, x)
        ```
    """
    mapped = _FilterShardMap(
        fn, mesh, in_specs, out_specs, frozenset(axis_names), check_vma
    )
    return ft.update_wrapper(mapped, fn, updated=())


def _broadcast_specs(
    specs: PyTree, tree: PyTree, name: str, root: str
) -> list[tuple[str, Any, PartitionSpec]]:
    """For each array of `tree`: its path, the array, and its spec from a prefix of `tree`.

    Errors call the specs `name`, and begin paths with `root`.
    """
    _check_all_specs(specs, name)
    parts: list[tuple[tuple[Any, ...], Any, PyTree]] = []
    try:
        jax.tree_util.tree_map_with_path(
            lambda *part: parts.append(part), specs, tree, is_leaf=lambda x: x is None
        )
    except ValueError as error:
        raise UsageError(
            f"{name} is not a prefix of {root}; give one PartitionSpec for "
            f"all of it, or a PyTree like it. ({error})"
        ) from None
    found: list[tuple[str, Any, PartitionSpec]] = []
    for above, spec, part in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if not is_array(leaf):
                continue
            where = leaf_path((*above, *path), root)
            if spec is None:
                raise UsageError(
                    f"{name} has None for the array {where} {leaf.shape}; write P() to "
                    "give every device the whole array."
                )
            found.append((where, leaf, spec))
    return found


def _check_all_specs(specs: PyTree, name: str) -> None:
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        if not isinstance(spec, PartitionSpec):
            raise UsageTypeError(
                f"{leaf_path(path, name)} is a {type(spec).__name__}, not a PartitionSpec; "
                "write jax.P(...) with the mesh axis of each dim, or the .spec of a "
                "NamedSharding."
            )
