"""A script that runs up to its call of `train`, which is then planned instead of made.

`cli` does that for `--plan`, and `python -m eqxshard plan` for any script.
"""

import contextlib
import dataclasses
import math
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jax.sharding import Mesh

from .._errors import UsageError
from ..data._datasets import add_note, planning
from ..data._steps import Steps
from ..planning._make_plan import plan
from ..sharding._mesh import batch_axes, resolve_sizes
from ..sharding._spec import AXES, format_sizes
from ._config import RunConfig, last_step, parse_plan
from ._devices import complete_mesh, parse_mesh
from ._parts import Training, TrainingData


@dataclass(frozen=True)
class PlannedRun:
    """A run of `train` that is planned instead."""

    config: RunConfig
    mesh: str | Mesh
    data: TrainingData
    training: Training
    epochs: int | None
    steps: int | None

    def for_mesh(self, devices: int) -> dict[str, Any]:
        """The arguments of [`eqxshard.plan`][] for the mesh of the run.

        **Raises:**

        `ValueError` if the mesh does not fit the devices, or the step is the script's own.
        """
        sizes = self._mesh_sizes(devices)
        return {**self._arguments(sizes), "mesh_shape": sizes, "devices": devices}

    def for_any_mesh(self, devices: int) -> dict[str, Any]:
        """The arguments of [`eqxshard.plan_search`][], other than the meshes to try."""
        return self._arguments(self._mesh_sizes(devices))

    def _arguments(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        if self.training.train_step is not None:
            raise UsageError(
                "this script gives train a step of its own, which is not planned; give "
                "eqxshard.plan its models and losses in Python."
            )
        batches = self.data.host_batches(self._batch_size(sizes), self.config.seed)
        of = Steps.of(1, max(batches.length, 1))
        last = last_step(self.config, self.epochs, self.steps, of)
        training = self.training.for_steps(last)
        # All but what only training itself needs.
        own = {"make_optim", "train_step", "lint"}
        given = {name: x for name, x in vars(training).items() if name not in own}
        return {**given, "optim": training.make_optim, "batch": batches.shapes()}

    def _mesh_sizes(self, devices: int) -> dict[str, int]:
        if devices < 1:
            raise UsageError(f"--devices {devices} is too small; use 1 or more.")
        if isinstance(self.mesh, str):
            sizes = complete_mesh(parse_mesh(self.config.mesh or self.mesh))
            try:
                return resolve_sizes({axis: sizes.get(axis, 1) for axis in AXES}, devices)
            except ValueError as error:
                # It is a mesh of the script, which the user may not have chosen.
                raise UsageError(f"{str(error).rstrip('.')}, by --mesh.") from None
        if self.config.mesh is not None or self.mesh.size != devices:
            raise UsageError(
                f"this script makes its own mesh, of {self.mesh.size} devices; let it give "
                "eqxshard.train the mesh as text, such as mesh='fsdp=-1', to plan others."
            )
        return dict(self.mesh.shape)

    def _batch_size(self, sizes: Mapping[str, int]) -> int:
        """The batch size, rounded up to one that divides."""
        over = {axis: sizes[axis] for axis in batch_axes(sizes)}
        parts = math.prod(over.values()) * self.training.accumulate
        given = self.config.batch_size
        rounded = given + -given % parts
        if rounded != given:
            add_note(
                f"--batch-size {given} does not divide into {parts} parts, over "
                f"{format_sizes(over)} with accumulate={self.training.accumulate}, so this "
                f"is a plan for --batch-size {rounded}"
            )
        return rounded


#: Gets a run, and a list of what else to know of its plan.
Planner = Callable[[PlannedRun, list[str]], None]

#: Called by `train` in place of training, with what it would train.
_planner: ContextVar[Callable[[PlannedRun], None]] = ContextVar("eqxshard_planner")


class _Planned(BaseException):
    """Ends a script once its run is planned, or could not be.

    Unlike the error that is its cause, no `except Exception` of the script stops it.
    """


def end_with_plan(run: PlannedRun) -> NoReturn:
    """Plan a run that a script is about to start, and end the script."""
    try:
        _planner.get()(run)
    except Exception as error:
        raise _Planned from error
    raise _Planned


@contextlib.contextmanager
def planned_by(planner: Planner) -> Iterator[None]:
    """Have the call of `train` that follows call a function, and end the script there.

    **Raises:**

    `ValueError` if `train` is not called; `SystemExit` if the script ends with an error.
    """
    with planning() as notes:
        token = _planner.set(lambda run: planner(run, notes))
        try:
            yield
        except _Planned as end:
            if end.__cause__ is not None:
                raise end.__cause__ from None
            return
        except SystemExit as end:
            if end.code:
                raise
        finally:
            _planner.reset(token)
    raise UsageError(
        f"{sys.argv[0]} does not call eqxshard.train, so there is nothing to plan; give a "
        "script that does, or use eqxshard.plan in Python."
    )


def plan_script(
    script: str | os.PathLike[str], options: Sequence[str], planner: Planner
) -> None:
    """Run a script as `__main__` up to its call of `train`, for [`planned_by`][].

    **Arguments:**

    - `script`: its path.
    - `options`: those of its command line.
    - `planner`: as for `planned_by`.

    **Raises:**

    `ValueError` if there is no such script; and as `planned_by` does.
    """
    path = Path(script)
    if not path.is_file():
        raise UsageError(f"there is no script {path}; give the path of one.")
    before = sys.argv, [*sys.path]
    sys.argv, sys.path[:] = [str(path), *options], [str(path.resolve().parent), *sys.path]
    try:
        with planned_by(planner):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def print_plan(text: str) -> Planner:
    """What `--plan 512xh200` asks for.

    **Raises:**

    `ValueError` if the text is not of this form.
    """
    count, device = parse_plan(text)

    def planner(run: PlannedRun, notes: list[str]) -> None:
        made = plan(**run.for_mesh(count), target=device)
        print(dataclasses.replace(made, notes=(*made.notes, *notes)))

    return planner
