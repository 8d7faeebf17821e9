"""`--plan 512xh200`: the plan that `train` makes instead of training."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import AxisType, Mesh

from .._errors import UsageError
from ..loop._clock import announced
from ..planning._make_plan import plan
from ..sharding._mesh import batch_axes, resolve_sizes
from ..sharding._spec import AXES, format_sizes
from ..sharding._text import say
from ._config import RunConfig, flag, last_step, parse_plan
from ._devices import complete_mesh, parse_mesh
from ._parts import Training, TrainingData


def plan_run(
    config: RunConfig,
    mesh: str | Mesh,
    data: TrainingData,
    training: Training,
    epochs: int | None,
    steps: int | None,
) -> None:
    """Print the plan of a run for the devices of `config.plan`, and write it to a file.

    **Arguments:**

    - `config`: the user's options, with a plan.
    - `mesh`, `epochs`, `steps`: as for [`eqxshard.train`][].
    - `data`, `training`: what would be trained on, and what would be trained.

    **Raises:**

    `ValueError` if the mesh does not fit the devices, or the step is the script's own; and
    as [`eqxshard.plan`][] does.
    """
    assert config.plan is not None
    if training.train_step is not None:
        raise UsageError(
            "this script gives train a step of its own, which is not planned; give it to "
            "eqxshard.plan_step in Python."
        )
    devices, target = parse_plan(config.plan)
    sizes = _mesh_sizes(config, mesh, devices)
    batch_size, notes = _batch_size(config, sizes, training.accumulate)
    shapes, of = data.shapes(config, batch_size)
    training = training.for_steps(last_step(config, epochs, steps, of))
    with announced("compiling the plan"):
        made = plan(
            training.make_model,  # pyright: ignore[reportArgumentType]
            training.loss_fn,  # pyright: ignore[reportArgumentType]
            training.make_optim,  # pyright: ignore[reportArgumentType]
            shapes,
            mesh_shape=sizes,
            rule=training.rule,
            target=target,
            trainable=training.trainable,
            precision=training.precision,
            accumulate=training.accumulate,
            nonfinite=training.nonfinite,
            grad_norms=training.grad_norms,
            compiler_options=training.compiler_options,
            explicit=_explicit_axes(mesh),
        )
    made = dataclasses.replace(made, notes=(*made.notes, *notes))
    print(made)
    if config.plan_file is not None:
        made.save(config.plan_file)
        say(f"\nThe plan is in {config.plan_file}.")


def _mesh_sizes(config: RunConfig, mesh: str | Mesh, devices: int) -> dict[str, int]:
    """The sizes of the axes of the planned mesh."""
    if isinstance(mesh, str):
        sizes = complete_mesh(parse_mesh(config.mesh or mesh))
        try:
            return resolve_sizes({axis: sizes.get(axis, 1) for axis in AXES}, devices)
        except ValueError as error:
            # The mesh may be the script's default: say which option changes it.
            said = str(error).rstrip(".")
            raise UsageError(f"{said}, by {flag('mesh')}.") from None
    if config.mesh is not None or mesh.size != devices:
        raise UsageError(
            f"this script makes its own mesh, of {mesh.size} devices; give eqxshard.train "
            "the mesh as text, such as mesh='fsdp=-1', to plan others."
        )
    return dict(mesh.shape)


def _explicit_axes(mesh: str | Mesh) -> list[str]:
    if isinstance(mesh, str):
        return []
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [axis for axis, kind in kinds if kind == AxisType.Explicit]


def _batch_size(
    config: RunConfig, sizes: Mapping[str, int], accumulate: int
) -> tuple[int, list[str]]:
    """The batch size, rounded up to one that divides, and a note if it was rounded."""
    over: dict[str, Any] = {axis: sizes[axis] for axis in batch_axes(sizes)}
    parts = math.prod(over.values()) * accumulate
    given = config.batch_size
    rounded = given + -given % parts
    if rounded == given:
        return given, []
    note = (
        f"{flag('batch_size')} {given} does not divide into {parts} parts, over "
        f"{format_sizes(over)} with accumulate={accumulate}, so this is a plan for "
        f"{flag('batch_size')} {rounded}"
    )
    return rounded, [note]
