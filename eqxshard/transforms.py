"""`filter_jit`: Equinox's filtering over what JAX's own can do."""

import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
from jax.sharding import Sharding
from jaxtyping import Array, PyTree

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
        f"{leaf_path(path, name)} is a {type(leaf).__name__}, "
        "neither an array nor hashable; make it an array, or something hashable such as a "
        "tuple."
    )


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
