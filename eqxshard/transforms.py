"""`filter_jit` and `filter_shard_map`: Equinox's filtering over what JAX's own can do."""

import functools as ft
import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from .rules import axes_of, check_axis, check_spec
from .sharding import filter_shard, is_array, leaf_path, spread

_P = ParamSpec("_P")
_T = TypeVar("_T")

Donate = Literal["none", "all", "all-except-first"] | int | Sequence[int]
#: One sharding for all arguments, or a tuple with an entry for each.
Shardings = Sharding | tuple[PyTree[Sharding | None], ...] | None


class _ArrayHere:
    """Stands in a skeleton where an array was taken out."""

    def __repr__(self) -> str:
        return "*"


_HERE = _ArrayHere()


class Skeleton:
    """All of a PyTree but its arrays: structure and static leaves, hashable.

    Two PyTrees with equal skeletons can share one compiled function.
    """

    __slots__ = ("_hash", "shapes", "static", "treedef")

    def __init__(self, treedef: Any, static: tuple[Any, ...], shapes: tuple[Any, ...] = ()):
        self.treedef = treedef
        self.static = static
        self.shapes = shapes
        self._hash = hash((treedef, static, shapes))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Skeleton)
            and self._hash == other._hash
            and self.treedef == other.treedef
            and self.static == other.static
            and self.shapes == other.shapes
            # 1 == 1.0 == True, and each is a different program.
            and [*map(type, self.static)] == [*map(type, other.static)]
        )

    def shaped(self, arrays: Sequence[Any]) -> "Skeleton":
        """The same with the shapes and types of its arrays, for what depends on them."""
        shapes = tuple((array.shape, array.dtype) for array in arrays)
        return Skeleton(self.treedef, self.static, shapes)

    def merge(self, arrays: Sequence[Any]) -> PyTree:
        """The PyTree again, with `arrays` where its arrays were."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is _HERE else leaf for leaf in self.static]
        return jax.tree.unflatten(self.treedef, leaves)


def split(tree: PyTree, name: str = "") -> tuple[list[Any], Skeleton]:
    """Take a PyTree apart into its arrays and the rest; errors begin paths with its name.

    `jax.jit` over the flat list costs a quarter of what it costs over the modules.
    """
    leaves, treedef = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    static = tuple(_HERE if is_array(leaf) else leaf for leaf in leaves)
    try:
        return arrays, Skeleton(treedef, static)
    except TypeError:
        raise TypeError(_unhashable(tree, name)) from None


class _Call(NamedTuple):
    """The arguments of one call; its field names begin the paths in errors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@jax.tree_util.register_pytree_node_class
class _Static:
    """Carries a skeleton out of a jitted function: a PyTree without leaves."""

    def __init__(self, skeleton: Skeleton):
        self.skeleton = skeleton

    def tree_flatten(self) -> tuple[tuple[()], Skeleton]:
        return (), self.skeleton

    @classmethod
    def tree_unflatten(cls, skeleton: Skeleton, _: tuple[()]) -> "_Static":
        return cls(skeleton)


class _FilterJit(Generic[_P, _T]):
    """What [`eqxshard.filter_jit`][] returns."""

    def __init__(
        self,
        fn: Callable[_P, _T],
        donate: Donate,
        in_shardings: Shardings,
        out_shardings: PyTree[Sharding | None],
    ):
        ft.update_wrapper(self, fn, updated=())
        # The name that profiles and compiled modules show.
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._signature = inspect.signature(fn)
        self._by_either = {
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        # The arrays of a callable module, or of one that a method is bound to, are
        # arguments like others: as constants they would be compiled in.
        self._fn_arrays, self._fn_skeleton = split(fn, "fn")
        self._donates = _donation(donate, self._signature)
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._jitted: dict[Skeleton, Any] = {}

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        jitted, arrays = self._prepare(args, kwargs)
        out, static = jitted(*arrays)
        return static.skeleton.merge(out)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, whose arrays may be `jax.ShapeDtypeStruct`s.

        **Returns:**

        JAX's own `Lowered`, over the flat list of arrays: for its text, its cost and its
        compiled memory.
        """
        jitted, arrays = self._prepare(args, kwargs)
        return jitted.lower(*arrays)

    @overload
    def __get__(self, instance: None, owner: type) -> "_FilterJit[_P, _T]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> Callable[..., _T]: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else ft.partial(self, instance)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            if not self._by_either.isdisjoint(bound.kwargs):
                # Some before it were left out, so that it has no position yet.
                bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        arrays, skeleton = split(_Call(args, kwargs))
        jitted = self._jitted.get(skeleton)
        if jitted is None:
            jitted = self._jitted[skeleton] = self._jit(args, kwargs, skeleton)
        return jitted, (*arrays, *self._fn_arrays)

    def _jit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], skeleton: Skeleton
    ) -> Any:
        fn_skeleton, out_shardings = self._fn_skeleton, self._out_shardings
        count = sum(leaf is _HERE for leaf in skeleton.static)

        def flat(*arrays: Array) -> tuple[list[Array], _Static]:
            args, kwargs = skeleton.merge(arrays[:count])
            out = fn_skeleton.merge(arrays[count:])(*args, **kwargs)
            if out_shardings is not None:
                out = filter_shard(out, out_shardings)
            arrays_out, static_out = split(out, "result")
            return arrays_out, _Static(static_out)

        flat.__name__ = flat.__qualname__ = self._name
        donated, placed = [], []
        per_argument = _per_argument(self._in_shardings, len(args))
        for index, (argument, sharding) in enumerate(
            zip((*args, kwargs), per_argument, strict=True)
        ):
            here = spread(sharding, argument)
            if self._donates(index if index < len(args) else None):
                donated.extend(range(len(placed), len(placed) + len(here)))
            placed.extend(here)
        placed.extend([None] * len(self._fn_arrays))
        return jax.jit(flat, donate_argnums=donated, in_shardings=tuple(placed))


@overload
def filter_jit(
    fn: Callable[_P, _T],
    *,
    donate: Donate = "none",
    in_shardings: Shardings = None,
    out_shardings: PyTree[Sharding | None] = None,
) -> _FilterJit[_P, _T]: ...


@overload
def filter_jit(
    *,
    donate: Donate = "none",
    in_shardings: Shardings = None,
    out_shardings: PyTree[Sharding | None] = None,
) -> Callable[[Callable[_P, _T]], _FilterJit[_P, _T]]: ...


def filter_jit(
    fn: Any = None,
    *,
    donate: Donate = "none",
    in_shardings: Shardings = None,
    out_shardings: PyTree[Sharding | None] = None,
) -> Any:
    """Compile a function of PyTrees: arrays are traced, everything else is static.

    As `equinox.filter_jit`, and besides: it returns without waiting for the result,
    costs little per call (the arrays go to `jax.jit` as a flat list), takes shardings,
    and donates the arguments that you name. Warnings of buffers that were donated in
    vain are shown.

    **Arguments:**

    - `fn`: a pure function. Its arguments and results may be PyTrees of anything; what
        is not an array must be hashable, and a new value of it compiles anew. `fn` may
        itself be a module or a bound method: its arrays are traced too.
    - `donate`: whose arrays to donate, so that their memory is used for the results and
        they are deleted: `"none"`; `"all"` arguments; `"all-except-first"`; or the
        position of an argument, or a sequence of positions. Arrays that belong to `fn`
        itself are never donated.
    - `in_shardings`: where the arguments lie: one sharding for all, or a tuple with one
        entry per positional argument, each a sharding, a PyTree of them that is a prefix
        of the argument, or `None` for as it comes. Arrays that are on no particular
        device, such as NumPy's, are moved there.
    - `out_shardings`: where the results lie: a sharding, or a PyTree of them that is a
        prefix of the result.

    **Returns:**

    A function like `fn`, with a method `lower` that takes the same arguments and returns
    a `jax.stages.Lowered`. Without `fn`, a decorator.

    **Raises:**

    `ValueError` if `donate` is none of these; when called, `TypeError` naming an
    argument that is neither an array nor hashable, and `ValueError` if an array does not
    divide as its sharding asks, or an argument was placed elsewhere.

    !!! Example

        ```python
        @eqxshard.filter_jit(donate="all-except-first")
        def step(optim, model, opt_state, x): ...
        ```
    """
    if fn is None:
        return ft.partial(
            filter_jit,
            donate=donate,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
        )
    return _FilterJit(fn, donate, in_shardings, out_shardings)


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class _FilterShardMap:
    """What [`eqxshard.filter_shard_map`][] returns: a PyTree, for the arrays of `fn`."""

    fn: Any
    mesh: Any
    in_specs: Any
    out_specs: Any
    axis_names: Any
    check_vma: Any

    def __call__(self, /, *args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if mesh.empty:
            raise ValueError(
                "filter_shard_map has no mesh; give it one, or call it under jax.set_mesh."
            )
        self._check(args, mesh)
        arrays, static = eqx.partition((self.fn, args), eqx.is_array)
        static_out: PyTree = None

        def per_device(arrays: PyTree) -> PyTree:
            nonlocal static_out
            fn, args = eqx.combine(arrays, static)
            out = fn(*args)
            spread_specs(self.out_specs, out, "out_specs", "result")
            arrays_out, static_out = eqx.partition(out, eqx.is_array)
            return arrays_out

        # The name that profiles and JAX's errors show.
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
        for axis in self.axis_names:
            check_axis(axis, mesh, f"axis_names={set(self.axis_names)}")
        if not isinstance(self.in_specs, tuple | PartitionSpec):
            raise TypeError(
                f"in_specs is a {type(self.in_specs).__name__}; give a tuple with an entry "
                "for each positional argument, or one PartitionSpec for all."
            )
        if isinstance(self.in_specs, tuple) and len(self.in_specs) != len(args):
            raise ValueError(
                f"in_specs has {len(self.in_specs)} entries for {len(args)} positional "
                "arguments; give one for each, or one PartitionSpec for all."
            )
        for path, leaf, spec in spread_specs(self.in_specs, args, "in_specs", "args"):
            check_spec(path, leaf.shape, spec, mesh)
            self._check_per_device(spec, path)
        _check_all_specs(self.out_specs, "out_specs")
        for spec in jax.tree.leaves(self.out_specs):
            for axis in spec_axes(spec):
                check_axis(axis, mesh, f"out_specs: {spec}")
            self._check_per_device(spec, "out_specs")

    def _check_per_device(self, spec: PartitionSpec, where: str) -> None:
        for axis in spec_axes(spec):
            if self.axis_names and axis not in self.axis_names:
                raise ValueError(
                    f"{where}: {spec} names the axis {axis!r}, which is none of "
                    f"axis_names={set(self.axis_names)}; add it there, or leave it out of "
                    "the spec and to the compiler."
                )


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

    As [`jax.shard_map`][], for PyTrees of anything: arrays are split and put together
    again, and everything else (functions, strings, numbers, `None`) is static, the same
    on every device, and passes through unchanged in both directions. Inside `fn`,
    devices speak to each other by `jax.lax`'s collectives and those of
    [`eqxshard.parallel.collectives`][].

    Like JAX's, it compiles nothing by itself: call it inside [`eqxshard.filter_jit`][].

    **Arguments:**

    - `fn`: a function of positional arguments, which gets and returns what one device
        has. It may itself be a module or a bound method: every device has its arrays
        whole.
    - `mesh`: from [`eqxshard.make_mesh`][]; `None` for the mesh of the context, which is
        that of the step inside a step.
    - `in_specs`: how the arguments are split: a `PartitionSpec` for all, or a tuple with
        an entry for each, itself a `PartitionSpec` or a PyTree of them that is a prefix
        of the argument. `None` is for what holds no arrays.
    - `out_specs`: how the results are put together: a `PartitionSpec`, or a PyTree of
        them that is a prefix of the result. Along an axis that a spec does not name, all
        devices must have the same.
    - `axis_names`: the mesh axes along which `fn` runs per device; the compiler sees to
        the others as it does outside. All axes if it is empty.
    - `check_vma`: whether JAX checks that results are the same where `out_specs` says so,
        and derives gradients from what it knows of that (*varying manual axes*).

    **Returns:**

    A function like `fn`, of whole arrays. It is a PyTree that holds `fn`.

    **Raises:**

    When called, `ValueError` if `in_specs` has another number of entries than there are
    arguments, specs are no prefix of what they are for, or a spec does not fit its array
    as for [`eqxshard.shardings`][]; `TypeError` for what is not a spec.

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


def spread_specs(
    specs: PyTree, tree: PyTree, name: str, root: str = ""
) -> list[tuple[str, Any, PartitionSpec]]:
    """For each array of `tree`: its path, itself, and its spec from a prefix of `tree`.

    Errors call the specs by their name, and begin paths with the root.
    """
    _check_all_specs(specs, name)
    parts: list[tuple[tuple[Any, ...], Any, PyTree]] = []
    try:
        jax.tree_util.tree_map_with_path(
            lambda *part: parts.append(part), specs, tree, is_leaf=lambda x: x is None
        )
    except ValueError as error:
        raise ValueError(
            f"{name} is not a prefix of {root or 'the PyTree'}; give one PartitionSpec for "
            f"all of it, or a PyTree like it. ({error})"
        ) from None
    found: list[tuple[str, Any, PartitionSpec]] = []
    for above, spec, part in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if not is_array(leaf):
                continue
            where = _join(root, (*above, *path))
            if spec is None:
                raise ValueError(
                    f"{name} has None for the array {where} {leaf.shape}; write P() for an "
                    "array that every device has whole."
                )
            found.append((where, leaf, spec))
    return found


def _check_all_specs(specs: PyTree, name: str) -> None:
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"{_join(name, path)} is a {type(spec).__name__}, not a PartitionSpec; "
                "write jax.P(...) with the mesh axis of each dim, or the .spec of a "
                "NamedSharding."
            )


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a spec names, in its order."""
    return tuple(axis for entry in spec for axis in axes_of(entry))


def _join(root: str, path: tuple[Any, ...]) -> str:
    return ".".join(filter(None, (root, leaf_path(path))))


def _donation(donate: Donate, signature: inspect.Signature) -> Callable[[int | None], bool]:
    """Whether the argument at a position (`None`: one by keyword only) is donated."""
    if donate == "none":
        return lambda index: False
    if donate == "all":
        return lambda index: True
    if donate == "all-except-first":
        return lambda index: index != 0
    positions = tuple(donate) if isinstance(donate, Sequence) else (donate,)
    # `type`, because donate=False would be the position 0.
    if not all(type(i) is int and i >= 0 for i in positions):
        raise ValueError(
            f"donate={donate!r} is not 'none', 'all', 'all-except-first', or one or more "
            "positions of arguments, counted from 0."
        )
    parameters = signature.parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    unlimited = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not unlimited and max(positions, default=-1) >= count:
        raise ValueError(
            f"donate={donate!r} names a position that the function does not have: it "
            f"takes {count} positional arguments, counted from 0."
        )
    return lambda index: index in positions


def _per_argument(shardings: Shardings, count: int) -> tuple[PyTree[Sharding | None], ...]:
    """One entry for each positional argument, and one for all others together."""
    if not isinstance(shardings, tuple):
        return (shardings,) * (count + 1)
    if len(shardings) != count:
        raise ValueError(
            f"in_shardings has {len(shardings)} entries for {count} positional arguments; "
            "give one for each (None for as it comes)."
        )
    return (*shardings, None)


def _unhashable(tree: PyTree, name: str) -> str:
    path, leaf = next(
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not (is_array(leaf) or _is_hashable(leaf))
    )
    return (
        f"{_join(name, path)} is a {type(leaf).__name__}, "
        "neither an array nor hashable; make it an array, or something hashable such as a "
        "tuple."
    )


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
