"""Lower and lint any jitted function."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from .._errors import UsageError, UsageTypeError
from ..compiled._findings import Finding
from ..compiled._hlo import Module
from ..compiled._lint_text import Argument, LintedStep, TextLint, unread_is_warned
from ..compiled._lowered import Input, LoweredStep, read_lowered
from ..training._lint_step import calls_host, lint_jaxpr, scanned_shapes
from ..training.rewrite._jaxprs import all_jaxprs, equations
from ._all_layers import lint_layers


class LoweredFunction(NamedTuple):
    """A function that was lowered.

    - `lowered`: the function as JAX lowered it.
    - `step`: its name, its mesh and the arrays that it takes.
    - `jaxpr`: its jaxpr; `None` if it was lowered before, or by another library.
    """

    lowered: jax.stages.Lowered
    step: LoweredStep
    jaxpr: Any

    @property
    def scanned(self) -> set[tuple[int, ...]]:
        """The shapes of the arrays of which loops take a part in each iteration."""
        return set() if self.jaxpr is None else scanned_shapes([*all_jaxprs(self.jaxpr)])

    def findings(self) -> Iterator[Finding]:
        """The findings in the jaxpr, if there is one."""
        if self.jaxpr is None:
            return
        floats = [
            dtype
            for each in self.step.inputs
            if jnp.issubdtype(dtype := jnp.dtype(each.dtype), jnp.floating)
        ]
        # A function that is given arrays of a wide type is meant to compute in it.
        yield from lint_jaxpr(
            [*all_jaxprs(self.jaxpr)],
            max(floats, key=lambda dtype: dtype.itemsize, default=None),
        )


def lower_function(
    fn: Callable[..., Any] | jax.stages.Lowered,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh | AbstractMesh | None = None,
    platform: str | None = None,
) -> LoweredFunction:
    """Lower a function, or take one that was lowered before.

    **Arguments:**

    - `fn`: a function that `jax.jit` returned, or one with the same methods `trace` or
        `lower`, such as those of `nnx.jit` and `eqx.filter_jit`; any other is compiled by
        `jax.jit`. Or the result of its `lower`.
    - `args`, `kwargs`: its arguments; none if it was lowered before.
    - `mesh`: the mesh to lower it under, if there is one.
    - `platform`: the platform to lower it for, by default that of the devices at hand.

    **Raises:**

    `TypeError` if `fn` is no function, or was lowered before and arguments are given;
    whatever the function raises; and as `lower_traced` does.
    """
    if isinstance(fn, jax.stages.Lowered):
        if args or kwargs:
            raise UsageTypeError(
                "a lowered function has its arguments already; leave them out, or give "
                "the function itself."
            )
        return LoweredFunction(fn, read_lowered(fn), None)
    if not callable(fn):
        raise UsageTypeError(
            f"a {type(fn).__name__} is not a function; give what jax.jit returns, or what "
            "its .lower(...) returns."
        )
    with _under(mesh):
        has_stages = hasattr(fn, "trace") or hasattr(fn, "lower")
        staged: Any = fn if has_stages else jax.jit(fn)
        jaxpr = None
        if hasattr(staged, "trace"):
            traced = staged.trace(*args, **kwargs)
            jaxpr = _unwrap(traced, "traced", jax.stages.Traced).jaxpr
            lowered = lower_traced(traced, platform)
        else:
            lowered = staged.lower(*args, **kwargs)
    lowered = _unwrap(lowered, "lowered", jax.stages.Lowered)
    return LoweredFunction(lowered, read_lowered(lowered), jaxpr)


def _under(mesh: Mesh | AbstractMesh | None) -> Any:
    """A context in which functions find the mesh, if there is one."""
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def lower_traced(traced: Any, platform: str | None) -> Any:
    """Lower a function that was traced.

    **Arguments:**

    - `traced`: the function as JAX, or another library, traced it.
    - `platform`: the platform to lower it for, by default that of the devices at hand.

    **Raises:**

    `ValueError` if the function calls the host and JAX cannot lower that for the platform,
    or if only the process that lowers it could compile it.
    """
    if platform is None:
        return traced.lower()
    jaxpr = _unwrap(traced, "traced", jax.stages.Traced).jaxpr
    if any(eqn.primitive.name == "custom_partitioning" for eqn in equations(jaxpr)):
        raise UsageError(
            "the step has a function with custom_partitioning of JAX, which only the "
            "process that lowered it can compile; plan it with jax.shard_map in its place."
        )
    try:
        return traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        if not calls_host(jaxpr):
            raise
        raise UsageError(
            "the function calls the host (as jax.debug.print does), which JAX lowers only "
            "for the devices at hand; take the call out, or use backend='cpu'."
        ) from error


def _unwrap(staged: Any, name: str, kind: type) -> Any:
    """JAX's own stage of a function, inside that of another library."""
    while not isinstance(staged, kind):
        if not hasattr(staged, name):
            raise UsageTypeError(
                f"a {type(staged).__module__}.{type(staged).__name__} is not JAX's "
                f"{kind.__name__}, and has none; give a function that jax.jit returns."
            )
        staged = getattr(staged, name)
    return staged


def describe_function(function: LoweredFunction) -> LintedStep:
    """The description of a function that lint needs to read its compiled text."""
    step = function.step
    batch = {each.name: (each.name, each.shape) for each in step.batch}
    arguments = [
        Argument(
            name=each.name,
            path=each.name,
            shape=each.shape,
            donated=each.donated,
            in_model=jnp.issubdtype(jnp.dtype(each.dtype), jnp.inexact),
        )
        for each in step.inputs
        if each.name not in batch
    ]
    return LintedStep(step.sizes, arguments, batch, function.scanned, step.batch_axes)


def lint_compiled(
    module: Module, step: LintedStep, inputs: Sequence[Input]
) -> Iterator[Finding]:
    """The findings in the compiled text of any step.

    **Arguments:**

    - `module`: the text.
    - `step`: the description of the step.
    - `inputs`: the arrays that a user's own function takes, to look for stacked layers;
        none for a step of ours.
    """
    with unread_is_warned("a step"):
        text = TextLint(module, step)
        yield from text.findings()
        if inputs:
            yield from dict.fromkeys(lint_layers(text, inputs))
