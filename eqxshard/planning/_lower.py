"""Lower a step here for devices that are not there, for the process that compiles it.

`lower_ours` makes the step of `make_train_step` on an abstract mesh; `lower_any` takes any
other function.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
)
from jaxtyping import PyTree

from .._errors import UsageError, UsageTypeError
from ..compiled._lowered import LoweredStep, unsplit_axes
from ..inspect._explain import explain
from ..inspect._functions import describe_function, lower_function, lower_traced
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import (
    AXES,
    axis_types,
    batch_sharding,
    no_such_axis,
    resolve_sizes,
)
from ..sharding._rule import Rule
from ..sharding._spec import spec_axes
from ..sharding._text import first_few
from ..training._init import abstract_state
from ..training._inputs import ONE_BATCH
from ..training._jit import lowered_as, options_for
from ..training._lint_step import describe_step, lint_traced
from ..training._optimizer import check_optim
from ..training._precision import Precision
from ..training._state import (
    TrainState,
    describe_repeated,
    is_offloaded,
    repeated_axes,
    unused_axes,
)
from ..training._train_step import make_train_step
from ._backends import check_whole_hosts, find_backend
from ._child import Request, dump_module
from ._read import Known
from ._targets import Compiler, Target, cores_of, target_here


class Place(NamedTuple):
    """Devices that are not there, their mesh, and a compiler for them.

    - `target`: the kind of device.
    - `backend`: the compiler.
    - `sizes`: the sizes of the axes of the mesh, in its order.
    """

    target: Target
    backend: Compiler
    sizes: Mapping[str, int]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes.values())

    def mesh(self, explicit: bool | Sequence[str]) -> AbstractMesh:
        """An abstract mesh, typed as [`eqxshard.make_mesh`][] types one of devices."""
        on_cpus, on_gpus = self.backend == "cpu", self.backend == "gpu"
        device = AbstractDevice(
            device_kind="cpu" if on_cpus else self.target.kind,
            num_cores=cores_of(self.target) if on_gpus else None,
            platform=self.backend,
        )
        return AbstractMesh(
            tuple(self.sizes.values()),
            tuple(self.sizes),
            axis_types=axis_types(explicit),
            abstract_device=device,
        )


def find_place(
    mesh_shape: Mapping[str, int],
    target: str | Target,
    devices: int | None,
    backend: Compiler | None,
) -> Place:
    """Check the devices to plan for, and choose the compiler.

    **Arguments:** as for [`eqxshard.plan`][].

    **Raises:**

    `ValueError` if the target or an axis is not known, the devices do not divide over the
    mesh or over hosts, or the backend is not installed.
    """
    found = Target.named(target) if isinstance(target, str) else target
    for axis in mesh_shape:
        if axis not in AXES:
            raise UsageError(no_such_axis(axis))
    if devices is None and -1 in mesh_shape.values():
        raise UsageError(
            "an axis of mesh_shape is -1, which takes the devices that are left; give "
            "devices= their number."
        )
    asked = {axis: mesh_shape.get(axis, 1) for axis in AXES}
    count = math.prod(asked.values()) if devices is None else devices
    place = Place(found, find_backend(found, backend), resolve_sizes(asked, count))
    check_whole_hosts(found, place.backend, place.devices)
    return place


def lower_ours(
    place: Place,
    make_model: Callable[[Any], PyTree],
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    batch: PyTree,
    *,
    rule: Rule,
    trainable: PyTree,
    precision: Precision | None,
    explicit: bool | Sequence[str] = False,
    **options: Any,
) -> Request:
    """Lower a step as [`eqxshard.make_train_step`][] makes it.

    **Arguments:** as for [`eqxshard.plan`][]; `place` is where to plan for, and `options`
    are the other arguments of `make_train_step`.

    **Raises:**

    What making the state and the step raises; and as `lower_traced` does.
    """
    check_optim(optim)
    mesh, batch = place.mesh(explicit), jax.tree.map(_abstract, batch)
    # The mesh of a caller's `jax.set_mesh` has other devices.
    with jax.set_mesh(None):
        ONE_BATCH.check(batch, mesh, options["accumulate"])
        state = abstract_state(
            make_model,
            optim,
            key=jax.random.key(0),
            mesh=mesh,
            rule=rule,
            trainable=trainable,
            precision=precision,
        )
        rows = jax.tree.leaves(batch)[0].shape[0]
        step = make_train_step(loss_fn, optim, mesh=mesh, **options)
        call = step.machine.look_up(state, None, ONE_BATCH)
        traced = call.trace(batch)
        lowered = lower_traced(traced, lowered_as(place.backend))

        def lower() -> jax.stages.Lowered:
            return lowered

        leaves = explain(state.model, mesh, rule, optim=optim, trainable=trainable).leaves
        gradients = {
            leaf.path: NamedSharding(mesh, leaf.update_spec).shard_shape(leaf.shape)
            for leaf in leaves
            if leaf.update_spec is not None
        }
        # The first array of a state is the number of the step, and then come the model's.
        paths = (path for path, _ in array_leaves(state.model))
        arrays = ", ".join(f"{path} {format_array(x)}" for path, x in array_leaves(batch))
        settings = {"rule": rule, "batch": arrays, "precision": precision, **options}
        unused = unused_axes(state, mesh, rule, lower)
        return Request(
            module=dump_module(lowered),
            target=place.target,
            backend=place.backend,
            devices=place.devices,
            sizes=place.sizes,
            compiler_options=options_for(mesh, options["compiler_options"]),
            names={f"arrays[{number}]": path for number, path in enumerate(paths, start=1)},
            gradients=gradients,
            linted=describe_step(call, traced.jaxpr, batch),
            inputs=(),
            known=Known(
                arguments=_arguments(state, batch),
                gradients=sum(leaf.gradient for leaf in leaves),
                offloaded=_bytes(_offloaded(state)),
                leaves=leaves,
            ),
            examples=rows,
            settings={name: str(value) for name, value in settings.items()},
            findings=tuple(lint_traced(call, traced.jaxpr)),
            repeated=tuple(repeated_axes(state, mesh, lower)),
            notes=tuple(said.removesuffix(".") for said in unused),
        )


def _abstract(leaf: Any) -> Any:
    """An array without its values."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _arguments(state: TrainState, batch: PyTree) -> dict[str, int]:
    """The exact bytes on one device of each argument of a step of ours."""
    params, optimizer = _bytes(state.model), _bytes(state.opt_state)
    rows = batch_sharding(state.step.sharding.mesh)
    return {
        "parameters": params,
        "optimizer state": optimizer - _bytes(_offloaded(state)),
        "other state": _bytes(state) - params - optimizer,
        "batch": sum(
            x.dtype.itemsize * math.prod(rows.shard_shape(x.shape))
            for x in jax.tree.leaves(batch)
        ),
    }


def _bytes(tree: PyTree) -> int:
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for _, leaf in array_leaves(tree)
    )


def _offloaded(state: TrainState) -> list[Any]:
    """The arrays of the optimizer's state that are in the host's memory."""
    assert state.made_with is not None  # By `abstract_state`.
    rule, leaves = state.made_with.rule, jax.tree.leaves(state.opt_state)
    return [leaf for leaf in leaves if is_offloaded(leaf, rule)]


def lower_any(
    fn: Callable[..., Any] | jax.stages.Lowered,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: Mesh | AbstractMesh | None,
    target: str | Target | None,
    backend: Compiler | None,
) -> Request:
    """Lower any function.

    **Arguments:** as for [`eqxshard.plan_step`][].

    **Raises:**

    What the function raises; `TypeError` for `devices=`; `ValueError` as `find_backend`
    and `check_whole_hosts` do; and as `lower_function` does.
    """
    found = Target.named(target) if isinstance(target, str) else target or target_here()
    compiler = find_backend(found, backend)
    if "devices" in kwargs and not _takes(fn, "devices"):
        raise UsageTypeError(
            "plan_step has no devices=, but counts those of the arguments' shardings; for "
            "more devices than there are here, give shardings on a "
            "jax.sharding.AbstractMesh, or give it as mesh=."
        )
    function = lower_function(fn, args, kwargs, mesh, lowered_as(compiler))
    step = function.step
    check_whole_hosts(found, compiler, step.devices)
    repeated = _repeated(step, function.lowered)
    notes = [*_notes(step, repeated)]
    if function.jaxpr is None:
        notes.append(
            "lint read only the compiled text, because the function was lowered before, or "
            "by another library: it did not look for dtypes, constants and callbacks"
        )
    arguments = dict.fromkeys(each.argument for each in step.inputs)
    return Request(
        module=dump_module(function.lowered),
        target=found,
        backend=compiler,
        devices=step.devices,
        sizes=step.sizes,
        compiler_options={},
        names={each.name: each.name for each in step.inputs},
        gradients={},
        linted=describe_function(function),
        inputs=step.inputs,
        known=None,
        examples=step.batch[0].shape[0] if step.batch else None,
        settings={"function": step.name, "arguments": ", ".join(arguments)},
        findings=tuple(function.findings()),
        repeated=repeated,
        notes=tuple(notes),
    )


def _takes(fn: Any, name: str) -> bool:
    """True if a function may have an argument of this name."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # It has no signature.
        return callable(fn)
    kinds = {each.kind for each in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _repeated(step: LoweredStep, lowered: jax.stages.Lowered) -> tuple[str, ...]:
    """The axes of the mesh over which a function splits nothing."""
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
            f"nothing is donated, so {first_few([*kept])} and the results of the same "
            "shapes are in memory together; give jax.jit donate_argnums for arguments that "
            "are not needed after the step"
        )
