"""`plan`: what a step needs, before there are devices."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from .._errors import UsageError
from ..sharding._files import local_path
from ..sharding._mesh import AXES, no_such_axis, resolve_sizes
from ..sharding._rule import Rule
from ..training._optimizer import check_optim
from ..training._precision import Precision
from ..training._update import Nonfinite
from ._backends import check_whole_hosts, find_backend
from ._plan import Plan
from ._process import Request, dump_request, run
from ._targets import Compiler, Target


def plan(
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    batch: PyTree,
    *,
    mesh_shape: Mapping[str, int],
    rule: Rule,
    target: str | Target = "h200",
    devices: int | None = None,
    backend: Compiler | None = None,
    trainable: PyTree = True,
    precision: Precision | None = None,
    accumulate: int = 1,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    explicit: bool | Sequence[str] = False,
    cache: str | os.PathLike[str] | None = None,
) -> Plan:
    """What a training step needs on devices that are not there.

    The very step of [`eqxshard.make_train_step`][] is compiled for them, in a process of
    its own, and read: its memory, its communication, its arithmetic. Its time is predicted
    from the peaks of the target, as the least that a step can take, and from how much of
    them steps reach.

    The process imports the script that calls this, if the model or the loss function are
    defined in it: put the call under `if __name__ == "__main__":`.

    **Arguments:**

    - `make_model`, `optim`, `rule`, `trainable`, `precision`: as for
        [`eqxshard.init_state`][].
    - `loss_fn`, `accumulate`, `nonfinite`, `grad_norms`, `compiler_options`: as for
        [`eqxshard.make_train_step`][].
    - `batch`: a batch of all devices, of arrays or `jax.ShapeDtypeStruct`s.
    - `mesh_shape`: the sizes of mesh axes, such as `{"data": 8, "fsdp": 64}`. One of them
        may be `-1`, if `devices` is given.
    - `target`: `a100`, `h100`, `h200`, `b200`, `b300`, `gb200`, `tpu-v4`, `tpu-v5e`,
        `tpu-v5p`, `tpu-v6e`, `cpu`, or an [`eqxshard.planning.Target`][].
    - `devices`: their number, by default the product of the mesh's axes.
    - `backend`: the compiler: `gpu`, `tpu` or `cpu`. By default that of the target, if
        it is installed, and else `cpu`: then communication is guessed from the partitioned
        step, and temporaries are an upper estimate.
    - `explicit`: the axes that are Explicit, as for [`eqxshard.make_mesh`][], for a model
        that is written for them.
    - `cache`: a folder for JAX's cache of compiled programs, in which to keep the compiled
        step, so that a run on such devices need not compile it. It is compiled once more
        for that. `plan.notes` says what is there.

    **Returns:**

    An [`eqxshard.planning.Plan`][], which prints as tables.

    **Raises:**

    `ValueError` if the target is not known, the devices do not divide over the mesh or
    over hosts, or the backend is not installed; what making the state and the step raises;
    `RuntimeError` if the compiler fails.

    !!! Example

        ```python
        tokens = jax.ShapeDtypeStruct((512, 8192), jnp.int32)
        print(
            eqxshard.plan(
                make_model,
                loss_fn,
                optax.adamw(1e-4),
                {"tokens": tokens, "targets": tokens},
                mesh_shape={"data": 8, "fsdp": 8, "tensor": 8},
                rule=rule,
                precision=eqxshard.Precision("bfloat16"),
                target="h200",
            )
        )
        ```
    """
    request = make_request(
        mesh_shape=mesh_shape,
        target=target,
        devices=devices,
        backend=backend,
        optim=optim,
        batch=batch,
        make_model=make_model,
        loss_fn=loss_fn,
        rule=rule,
        trainable=trainable,
        precision=precision,
        accumulate=accumulate,
        nonfinite=nonfinite,
        grad_norms=grad_norms,
        compiler_options=compiler_options,
        explicit=explicit,
        cache=None if cache is None else local_path(cache, "cache="),
    )
    return run(dump_request(request), request.backend)


def make_request(
    *,
    mesh_shape: Mapping[str, int],
    target: str | Target,
    devices: int | None,
    backend: Compiler | None,
    batch: PyTree,
    accumulate: int,
    nonfinite: Nonfinite,
    grad_norms: bool,
    compiler_options: Mapping[str, Any] | None,
    **others: Any,
) -> Request:
    """Check the arguments of a plan; choose its compiler.

    **Arguments:** as for `plan`; `others` are the fields of the request that are taken
    as they are.
    """
    check_optim(others["optim"])
    found = Target.named(target) if isinstance(target, str) else target
    sizes = _mesh_sizes(mesh_shape, devices)
    count = math.prod(sizes.values())
    compiler = find_backend(found, backend)
    check_whole_hosts(found, compiler, count)
    return Request(
        batch=jax.tree.map(_abstract, batch),
        mesh_shape=sizes,
        target=found,
        backend=compiler,
        options={
            "accumulate": accumulate,
            "nonfinite": nonfinite,
            "grad_norms": grad_norms,
            "compiler_options": compiler_options,
        },
        **others,
    )


def _mesh_sizes(asked: Mapping[str, int], devices: int | None) -> dict[str, int]:
    """The size of each axis of the mesh."""
    for axis in asked:
        if axis not in AXES:
            raise UsageError(no_such_axis(axis))
    if devices is None and -1 in asked.values():
        raise UsageError(
            "an axis of mesh_shape is -1, which takes the devices that are left; give "
            "devices= their number."
        )
    sizes = {axis: asked.get(axis, 1) for axis in AXES}
    return resolve_sizes(sizes, math.prod(sizes.values()) if devices is None else devices)


def _abstract(leaf: Any) -> Any:
    """An array without its values."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf
