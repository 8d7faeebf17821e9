"""The parts of JAX that may change from one version to the next, all in this file.

They are names of `jax.extend`, `jax.interpreters` and `jax.core`, attributes of equations
and of the types of arrays, and the client of JAX's coordination service. All other files
use documented names only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer
from jax.extend.backend import get_compile_options as get_compile_options
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Var as Var
from jax.extend.core import gensym as gensym
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters.mlir import ir as ir
from jax.interpreters.mlir import make_ir_context as make_ir_context
from jax.interpreters.partial_eval import dce_jaxpr as dce_jaxpr

#: The scope in the names of operations that `jax.checkpoint` computes again.
REMATTED = "rematted_computation"


def coordination_client() -> Any:
    """The client of JAX's coordination service; `None` in a run of one process."""
    from jax.experimental import multihost_utils

    module: Any = multihost_utils
    return module.distributed.global_state.client


def bind(eqn: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Evaluate an equation on other inputs, with other parameters; return its outputs."""
    out = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params({**params}))
    return list(out) if eqn.primitive.multiple_results else [out]


def context_of(eqn: Any) -> Any:
    """The settings that an equation was traced under; their `manager` applies them."""
    return eqn.ctx


def mesh_of(eqn: Any) -> jax.sharding.AbstractMesh:
    """The mesh in the context of an equation."""
    return eqn.ctx.cur_abstract_mesh


def with_context(eqn: Any, context: Any) -> Any:
    """A copy of an equation in another context."""
    return eqn.replace(ctx=context)


def at_line_of(eqn: Any, new: Any) -> Any:
    """A copy of the equation `new` that comes from the same user's line as `eqn`."""
    return new.replace(source_info=eqn.source_info)


def scope_of(eqn: Any) -> str:
    """The names of the transforms and scopes around an equation."""
    return str(eqn.source_info.name_stack)


def frames_of(eqn: Any) -> Sequence[Any]:
    """The frames that an equation was traced in, innermost first."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else traceback.frames


def varies_along(aval: Any) -> frozenset[str]:
    """The mesh axes along which an array of this type varies inside `jax.shard_map`."""
    return aval.manual_axis_type.varying


def mapped_axes(eqn: Any) -> set[str]:
    """The mesh axes along which a `jax.shard_map` runs its function per device."""
    name = "manual_axes" if "manual_axes" in eqn.params else "newly_manual_axes"
    return {*eqn.params[name]}  # The second name is that of JAX 0.10.2 and later.
