"""Any jitted function: lower it, and look for what is most likely not meant."""

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

    - `lowered`: what JAX made of it.
    - `step`: what it takes.
    - `jaxpr`: what was traced; `None` if it was lowered elsewhere.
    """

    lowered: jax.stages.Lowered
    step: LoweredStep
    jaxpr: Any

    @property
    def scanned(self) -> set[tuple[int, ...]]:
        """The shapes of the arrays of which loops take a part in each iteration."""
        return set() if self.jaxpr is None else scanned_shapes([*all_jaxprs(self.jaxpr)])

    def findings(self) -> Iterator[Finding]:
        """What lint finds in what was traced: nothing of a function lowered elsewhere."""
        if self.jaxpr is None:
            return
        floats = [
            dtype
            for each in self.step.inputs
            if jnp.issubdtype(dtype := jnp.dtype(each.dtype), jnp.floating)
        ]
        # Whoever gives it arrays of a wide type means to compute in it.
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
    """Lower a function, or take what was lowered.

    **Arguments:**

    - `fn`: the function: of `jax.jit`, or of what has its `trace` or `lower`, as
        `nnx.jit` and `eqx.filter_jit` do; any other is compiled by `jax.jit`.
    - `args`, `kwargs`: its arguments.
    - `mesh`: to lower it under, if there is one.
    - `platform`: to lower it for, by default that of the devices at hand.

    **Raises:**

    `TypeError` if it is something else, or was lowered and has arguments nevertheless; and
    what the function raises; `ValueError` if it calls the host of another platform.
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
    """A context in which functions find the mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def lower_traced(traced: Any, platform: str | None) -> Any:
    """Lower a function that was traced.

    **Arguments:**

    - `traced`: by JAX, or another library's.
    - `platform`: to lower it for, by default that of the devices at hand.

    **Raises:**

    `ValueError` if it calls the host of another platform, or has a function that only the
    process that lowers it can compile.
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
    """JAX's own object in that of another library."""
    while not isinstance(staged, kind):
        if not hasattr(staged, name):
            raise UsageTypeError(
                f"a {type(staged).__module__}.{type(staged).__name__} is not JAX's "
                f"{kind.__name__}, and has none; give a function that jax.jit returns."
            )
        staged = getattr(staged, name)
    return staged


def describe_function(function: LoweredFunction) -> LintedStep:
    """What lint has to know of any function to read its text."""
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
    - `step`: what it takes.
    - `inputs`: of a function of the user's own, its arrays, to look for stacked layers.
    """
    with unread_is_warned("a step"):
        text = TextLint(module, step)
        yield from text.findings()
        if inputs:
            yield from dict.fromkeys(lint_layers(text, inputs))
