"""`filter_jit`: `jax.jit` with Equinox's filtering."""

import contextlib
import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
from jax.sharding import Sharding
from jaxtyping import Array, PyTree

from .._errors import UsageError
from .._jax import Tracer
from ..sharding._placement import filter_shard
from ._compiles import MAX_PROGRAMS, CompileLog, function_name
from ._partition import Static, partition

_P = ParamSpec("_P")
_T = TypeVar("_T")

Donate = Literal["none", "all", "all-except-first"] | int | Sequence[int]


class _Arguments(NamedTuple):
    """The arguments of a call; paths in errors begin with its field names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _FilterJit(Generic[_P, _T]):
    """The function that [`eqxshard.filter_jit`][] returns."""

    def __init__(
        self,
        fn: Callable[_P, _T],
        donate: Donate,
        out_shardings: PyTree[Sharding | None],
    ):
        ft.update_wrapper(self, fn, updated=())
        # The name in profiles and compiled modules.
        self._name = function_name(fn)
        self._signature = inspect.signature(fn)
        self._by_either = {
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        }
        # The arrays of a callable module, or of a bound method's module, are passed as
        # arguments: as constants they would be compiled in.
        self._fn_arrays, self._fn_static = partition(fn, "fn")
        self._donates = _donation(donate, fn)
        self._out_shardings = out_shardings
        self._compile_log = CompileLog()
        self._jitted = ft.lru_cache(MAX_PROGRAMS)(self._jit)

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        jitted, arrays = self._prepare(args, kwargs)
        try:
            out, static = jitted(*arrays)
        except RuntimeError as error:
            # JAX checks before it donates anything, but does not name the function.
            if any(x.is_deleted() for x in arrays if isinstance(x, jax.Array)):
                raise UsageError(
                    f"an argument of {self._name} was donated to an earlier call, or "
                    "deleted; use what that call returned."
                ) from error
            raise
        return static.combine(out)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower for these arguments, whose arrays may be `jax.ShapeDtypeStruct`s.

        **Returns:**

        JAX's own `Lowered`, over the flat list of arrays, for its text, cost and memory.
        """
        jitted, arrays = self._prepare(args, kwargs)
        return jitted.lower(*arrays)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else ft.partial(self, instance)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            if not self._by_either.isdisjoint(bound.kwargs):
                # An argument before it was left out, so it has no position yet.
                bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        arrays, static = partition(_Arguments(args, kwargs))
        # Inside another function that is traced, this is a part of that function's program.
        is_inside = any(isinstance(array, Tracer) for array in arrays)
        return self._jitted(static, is_inside), (*arrays, *self._fn_arrays)

    def _jit(self, static: Static, is_inside: bool) -> Any:
        fn_static, out_shardings = self._fn_static, self._out_shardings
        count = static.array_count

        def flat(*arrays: Array) -> tuple[list[Any], Static]:
            args, kwargs = static.combine(arrays[:count])
            # Without defaults: a call that leaves one out is another program.
            arguments = self._signature.bind(*args, **kwargs).arguments
            counted = self._compile_log.compiling(self._name, arguments)
            with contextlib.nullcontext() if is_inside else counted:
                out = fn_static.combine(arrays[count:])(*args, **kwargs)
            if out_shardings is not None:
                out = filter_shard(out, out_shardings)
            return partition(out, "result")

        flat.__name__ = flat.__qualname__ = self._name
        args, kwargs = static.only(range(count))
        donated, start = [], 0
        for index, argument in enumerate((*args, kwargs)):
            end = start + len(jax.tree.leaves(argument))
            if self._donates(index if index < len(args) else None):
                donated.extend(range(start, end))
            start = end
        return jax.jit(flat, donate_argnums=donated)


@overload
def filter_jit(
    fn: Callable[_P, _T],
    *,
    donate: Donate = "none",
    out_shardings: PyTree[Sharding | None] = None,
) -> _FilterJit[_P, _T]: ...


@overload
def filter_jit(
    *,
    donate: Donate = "none",
    out_shardings: PyTree[Sharding | None] = None,
) -> Callable[[Callable[_P, _T]], _FilterJit[_P, _T]]: ...


def filter_jit(
    fn: Any = None,
    *,
    donate: Donate = "none",
    out_shardings: PyTree[Sharding | None] = None,
) -> Any:
    """Compile a function of PyTrees: arrays are traced, everything else is static.

    Like `equinox.filter_jit`, but it returns without waiting for the result, costs less
    per call (the arrays go to `jax.jit` as a flat list), takes the shardings of the result,
    and donates the arguments that you name. Warnings about unusable donated buffers are
    shown, and each compile but the first is explained in the log, as a warning: which
    argument changed.

    **Arguments:**

    - `fn`: a pure function. Its arguments and results may be PyTrees of anything; leaves
        that are not arrays must be hashable, and a new value compiles again (the 64
        programs that were used last are kept). `fn` may itself be a module or a bound
        method: its arrays are traced too.
    - `donate`: the arguments to donate, so that their memory is reused for the results
        and they are deleted: `"none"`, `"all"`, `"all-except-first"`, or one or more
        positions. Arrays that belong to `fn` itself are never donated.
    - `out_shardings`: the shardings of the result: one, or a PyTree of them that is a
        prefix of the result.

    **Returns:**

    A function like `fn`, with a method `lower` that takes the same arguments and returns
    a `jax.stages.Lowered`. Without `fn`, a decorator.

    **Raises:**

    `ValueError` if `donate` is none of these; when called, `TypeError` naming a leaf that
    is neither an array nor hashable, and `ValueError` if an argument was donated to an
    earlier call, or an array of the result does not divide as its sharding asks.

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
            out_shardings=out_shardings,
        )
    return _FilterJit(fn, donate, out_shardings)


def _donation(donate: Donate, fn: Callable[..., Any]) -> Callable[[int | None], bool]:
    """A test if the argument at a position (`None`: a keyword-only one) is donated."""
    if donate == "none":
        return lambda index: False
    if donate == "all":
        return lambda index: True
    if donate == "all-except-first":
        return lambda index: index != 0
    positions = tuple(donate) if isinstance(donate, Sequence) else (donate,)
    # `type`, because donate=False would be the position 0.
    if not all(type(i) is int and i >= 0 for i in positions):
        raise UsageError(
            f"donate={donate!r} is not 'none', 'all', 'all-except-first', or one or more "
            "positions of arguments, from 0."
        )
    jax.jit(fn, donate_argnums=positions)  # Refuses positions that the function lacks.
    return lambda index: index in positions
