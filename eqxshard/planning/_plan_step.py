"""`plan_step`: what any jitted function needs, on devices that are not there."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .._errors import UsageTypeError
from ..compiled._lowered import LoweredStep, unsplit_axes
from ..inspect._functions import lower_function
from ..sharding._spec import spec_axes
from ..sharding._text import first_few
from ..training._state import describe_repeated
from ._backends import check_whole_hosts, find_backend
from ._modules import dump_module
from ._plan import Plan
from ._process import StepRequest, dump_request, run
from ._targets import Compiler, Target, target_here

#: JAX's names of the platforms that compilers are for.
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}


def plan_step(
    fn: Callable[..., Any] | jax.stages.Lowered,
    /,
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    target: str | Target | None = None,
    backend: Compiler | None = None,
    **kwargs: Any,
) -> Plan:
    """What any jitted function needs on devices that are not there, and its lint.

    The function may be anyone's: of plain JAX, Flax, Haiku or another trainer, with
    `shard_map` or without. It is traced and lowered here, for as many devices as its
    arguments and its mesh have, which may be simulated. What was lowered is compiled for
    the target in a process of its own, so nothing of the function has to be importable
    there.

    **Arguments:**

    - `fn`: what `jax.jit` returns, or another function with its `trace` or `lower`, such
        as those of `nnx.jit` and `eqx.filter_jit`; any other is compiled by `jax.jit`. Or
        what `lower` returned: then lint reads only the compiled text.
    - `args`, `kwargs`: its arguments: arrays, or `jax.ShapeDtypeStruct`s with the shardings
        that the arrays would have (`eqx.filter_jit` takes only arrays).
    - `mesh`: the mesh to trace it under, for functions and arguments that name only axes.
        A `jax.sharding.AbstractMesh` plans for more devices than there are here.
    - `target`: as for [`eqxshard.plan`][]. By default the devices at hand.
    - `backend`: as for [`eqxshard.plan`][].

    **Returns:**

    An [`eqxshard.planning.Plan`][], which prints as tables. Its memory is by argument of
    the function, and its arrays are all that the function takes.

    **Raises:**

    What the function raises when it is traced; `TypeError` if it is no function, or
    `devices` is given, which it does not take;
    `ValueError` if the target is not known, its devices are not whole hosts, the backend is
    not installed, or the function calls the host and is planned for other devices;
    `RuntimeError` if the compiler fails.

    !!! Example

        ```python
        step = jax.jit(train_step, donate_argnums=(0, 1))
        print(eqxshard.plan_step(step, params, opt_state, batch, target="h200"))
        ```
    """
    found = Target.named(target) if isinstance(target, str) else target or target_here()
    compiler = find_backend(found, backend)
    if "devices" in kwargs and not _takes(fn, "devices"):
        raise UsageTypeError(
            "plan_step has no devices=, but counts those of the arguments' shardings; for "
            "more devices than there are here, give shardings on a "
            "jax.sharding.AbstractMesh, or give it as mesh=."
        )
    function = lower_function(fn, args, kwargs, mesh, _PLATFORMS[compiler])
    check_whole_hosts(found, compiler, function.step.devices)
    step = function.step
    repeated = _repeated(step, function.lowered)
    notes = [*_notes(step, repeated)]
    if function.jaxpr is None:
        notes.append(
            "lint read only the compiled text, because the function came lowered, or as "
            "another library's: it looked for no dtypes, constants and callbacks"
        )
    request = StepRequest(
        module=dump_module(function.lowered),
        step=step,
        target=found,
        backend=compiler,
        findings=tuple(function.findings()),
        scanned=function.scanned,
        repeated=repeated,
        notes=tuple(notes),
    )
    return run(dump_request(request), compiler)


def _takes(fn: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # It has none.
        return callable(fn)
    kinds = {each.kind for each in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _repeated(step: LoweredStep, lowered: jax.stages.Lowered) -> tuple[str, ...]:
    """The axes over which a function splits nothing."""
    split = {
        axis for each in step.inputs for axis in spec_axes(each.spec or PartitionSpec())
    }
    idle = [axis for axis, n in step.sizes.items() if n > 1 and axis not in split]
    return tuple(unsplit_axes(idle, lambda: lowered))


def _notes(step: LoweredStep, repeated: tuple[str, ...]) -> Iterator[str]:
    for axis in repeated:
        yield (
            f"{describe_repeated(axis, step.sizes[axis])}; split the batch or other arrays "
            f"over {axis}"
        )
    kept = dict.fromkeys(each.argument for each in step.inputs if step.is_kept(each))
    if kept and not any(each.donated for each in step.inputs):
        yield (
            f"nothing is donated, so {first_few([*kept])} and what is returned of the same "
            "shapes are in memory together; give jax.jit donate_argnums for what is not "
            "needed after the step"
        )
