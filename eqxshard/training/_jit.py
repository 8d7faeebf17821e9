"""`jit_on`: `jax.jit`, with checks that raise, and with fast convolutions on CPUs."""

import contextlib
import functools as ft
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._errors import UsageError
from .._jax import Tracer
from ..sharding._explicit import (
    auto_mesh,
    computing_on_auto,
    is_explicit,
    to_auto,
    to_explicit,
)
from ..sharding._mesh import is_on_cpus, platform_of
from ..sharding._placement import broadcast_prefix
from ..sharding._spec import AnyMesh
from ._donation import any_donated
from .rewrite._checks import Checks, Errors, note_checks, number_checks, without_unused
from .rewrite._convolutions import fast_convolution, fast_convolutions
from .rewrite._guards import guard_partitioner, sum_tables_whole
from .rewrite._interpreter import Interpreter, is_rewriting, run_rewritten
from .rewrite._types import erase_types

_DEBUG_NANS_LATE = (
    "jax_debug_nans found a nan in this step, and the state was donated; turn it on before "
    "the step is first called, so that JAX donates nothing, and go on from what you saved."
)


def lowered_as(platform: str) -> str:
    """The name that JAX has for a platform when it lowers for it."""
    return "cuda" if platform == "gpu" else platform


def jit_on(
    mesh: AnyMesh,
    fn: Callable[..., Any],
    name: str,
    tracing: Callable[..., contextlib.AbstractContextManager[None]] = lambda *args: (
        contextlib.nullcontext()
    ),
    **options: Any,
) -> Any:
    """Compile a function of PyTrees of arrays for the devices of a mesh.

    **Arguments:**

    - `mesh`: the mesh that it runs on.
    - `fn`: a pure function.
    - `name`: its name in profiles and compiled modules.
    - `tracing`: from the arguments to a context in which JAX traces the function.
    - `options`: those of `jax.jit`, with `out_shardings`; `compiler_options` go before
        those for the devices of the mesh.

    **Returns:**

    A jitted function, to be called by `call_jitted`.
    """

    def traced(*args: Any) -> tuple[Any, Checks | None]:
        # Under jax_debug_nans, JAX calls this again with the arrays of a call that met nan,
        # to find the operation, and segfaults on those that were donated. It does not look
        # into programs that were rewritten.
        leaves = jax.tree.leaves(args)
        if any_donated(leaves):
            raise FloatingPointError(_DEBUG_NANS_LATE)
        if leaves and not any(isinstance(leaf, Tracer) for leaf in leaves):
            there: Any = mesh  # A mesh of devices, as there are arrays.
            with jax.set_mesh(there) if is_explicit(mesh) else contextlib.nullcontext():
                return fn(*args), None
        with tracing(*args):
            if not is_explicit(mesh):
                return run(*args)
            with computing_on_auto(mesh):
                out, checks = run(*to_auto(args))
            return _typed(out, given), checks

    def run(*args: Any) -> tuple[Any, Checks | None]:
        if not is_rewriting():
            return fn(*args), None
        errors = Errors()

        def rewrite(jaxpr: Any) -> Any:
            if is_explicit(mesh):
                jaxpr = erase_types(jaxpr)
            return step_rules(mesh, errors).rewrite(without_unused(jaxpr))

        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        out, failed = run_rewritten(rewrite, jaxpr, out, args)
        return out, Checks(failed[0], errors) if failed else None

    # Keeps the names of the function's arguments, which the compiled module has, too.
    ft.update_wrapper(traced, fn, assigned=(), updated=())
    traced.__name__ = traced.__qualname__ = name
    replicated, given = NamedSharding(mesh, PartitionSpec()), options["out_shardings"]
    options["out_shardings"] = (given, replicated)
    chosen = options.get("compiler_options") or {}
    _check_options(chosen, mesh)
    options["compiler_options"] = options_for(mesh, chosen)
    return jax.jit(traced, **options)


def options_for(mesh: AnyMesh, chosen: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of XLA for a program on a mesh; those that were chosen go first."""
    return (cpu_options() if is_on_cpus(mesh) else {}) | {**(chosen or {})}


def lower_for(mesh: AnyMesh, traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lower a program for the devices of a mesh, which may not be there."""
    if not isinstance(mesh, AbstractMesh):
        return traced.lower()
    platform = lowered_as(platform_of(mesh))
    return traced.lower(lowering_platforms=(platform,))


def step_rules(mesh: AnyMesh, errors: Errors) -> Interpreter:
    """The rules for programs that run on a mesh.

    **Arguments:**

    - `mesh`: the mesh.
    - `errors`: collects the errors that checks in the program raise.
    """
    on_cpu = is_on_cpus(mesh)
    convolve = fast_convolution if on_cpu else jax.lax.conv_general_dilated_p.bind
    guard = guard_partitioner(auto_mesh(mesh), convolve)
    faster = [fast_convolutions] if on_cpu else []
    rules = [guard, sum_tables_whole, *faster, number_checks(errors)]
    return Interpreter(rules, inner_rules=[guard, note_checks(errors)])


def cpu_options(**others: Any) -> dict[str, Any]:
    """Options of XLA for programs on CPUs, apart from those that XLA_FLAGS has.

    Single products go to YNNPACK, and nothing else does. By default (JAX 0.10.2 to 0.12),
    XLA hands it sums, too, and fuses them with the products before them, which is wrong
    (jax-ml/jax#39103); and convolutions, which takes five times as long as XLA's own kernel
    for the gradient of a weight.

    **Arguments:**

    - `others`: more options.
    """
    options = {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        **others,
    }
    flags = _xla_flags()
    return {name: value for name, value in options.items() if name not in flags}


def _xla_flags() -> str:
    """The user's flags of XLA: the text of XLA_FLAGS, or of the file that it names."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    path = Path(flags)
    return path.read_text() if path.is_file() else ""


def _check_options(options: Mapping[str, Any], mesh: AnyMesh) -> None:
    """Compile a function of nothing; raise `ValueError` if XLA refuses the options."""
    if not options:
        return
    if isinstance(mesh, AbstractMesh) and platform_of(mesh) == "tpu":
        return  # Only the compiler for TPUs knows its own, in the process that compiles.
    # Devices that are not there compile nothing.
    is_there = not isinstance(mesh, AbstractMesh)
    place = NamedSharding(mesh, PartitionSpec()) if is_there else None
    probe = jax.jit(lambda: jnp.zeros(()), out_shardings=place)
    try:
        probe.lower().compile(compiler_options={**options})
    except (RuntimeError, TypeError) as error:
        said = str(error).removeprefix("INVALID_ARGUMENT: ").split("\n")[0].rstrip(".")
        if isinstance(error, TypeError):
            said = "names are text, and values text, numbers or bool"
        raise UsageError(
            f"compiler_options={dict(options)!r} are not options of XLA in jax "
            f"{jax.__version__} ({said}); use those of jax.jit(compiler_options=...)."
        ) from None


def _typed(out: PyTree, shardings: PyTree[NamedSharding]) -> PyTree:
    """The outputs of a step, with the types that its shardings say."""
    given: list[Any] = broadcast_prefix(shardings, out)
    leaves, structure = jax.tree.flatten(out)
    typed = [to_explicit(x, each) for x, each in zip(leaves, given, strict=True)]
    return jax.tree.unflatten(structure, typed)


def jit_is_off() -> UsageError:
    """The error under `jax_disable_jit`, where JAX ignores shardings and donation."""
    return UsageError(
        "jax_disable_jit is on, and it is compilation that splits arrays over devices; "
        "turn it off. To debug, print values with jax.debug.print, or call the loss "
        "function itself under jax.disable_jit()."
    )


class Program(NamedTuple):
    """A function as JAX traced it and XLA compiled it, for lint.

    - `jaxpr`: the traced function.
    - `compiled`: the compiled function.
    """

    jaxpr: Any
    compiled: jax.stages.Compiled

    @property
    def text(self) -> str:
        """The compiled function as text."""
        return self.compiled.as_text() or ""


def call_jitted(jitted: Any, *args: Any) -> Any:
    """Call a function from `jit_on`; if it has checks, wait for them, and raise."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise jit_is_off()
    out, checks = jitted(*args)
    if checks is not None:
        checks.raise_failed()
    return out
