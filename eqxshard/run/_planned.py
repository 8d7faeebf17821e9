"""A script that runs up to its call of `train`, which is then planned instead of made.

`cli` does that for `--plan`, and `python -m eqxshard plan` for any script.
"""

import contextlib
import dataclasses
import math
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jax.sharding import Mesh

from ..data._datasets import add_note, planning
from ..planning._make_plan import plan
from ..sharding._mesh import AXES, BATCH_AXES, resolve_sizes
from ..sharding._spec import format_sizes
from ..sharding._text import nearest_multiples
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

        `ValueError` if the mesh or the batch size does not fit the devices.
        """
        sizes = self._mesh_sizes(devices)
        arguments = self._arguments(self._batch_size(sizes, may_stay=False))
        return {**arguments, "mesh_shape": sizes, "devices": devices}

    def for_any_mesh(self, devices: int) -> dict[str, Any]:
        """The arguments of [`eqxshard.plan_search`][], other than the meshes to try."""
        sizes = self._mesh_sizes(devices)
        return self._arguments(self._batch_size(sizes, may_stay=True))

    def _arguments(self, batch_size: int) -> dict[str, Any]:
        batches = self.data.host_batches(batch_size, self.config.seed)
        epoch = max(batches.length, 1)
        training = self.training.for_steps(
            last_step(self.config, self.epochs, self.steps, epoch)
        )
        if training.train_step is not None:
            raise ValueError(
                "this script gives train a step of its own, which cannot be planned here; "
                "use eqxshard.plan_step in Python."
            )
        return {
            "make_model": training.make_model,
            "loss_fn": training.loss_fn,
            "optim": training.make_optim,
            "batch": batches.shapes(),
            "rule": training.rule,
            "trainable": training.trainable,
            "precision": training.precision,
            "accumulate": training.accumulate,
            "nonfinite": training.nonfinite,
            "grad_norms": training.grad_norms,
        }

    def _mesh_sizes(self, devices: int) -> dict[str, int]:
        if devices < 1:
            raise ValueError(f"--devices {devices} is too small; use 1 or more.")
        if isinstance(self.mesh, str):
            sizes = complete_mesh(parse_mesh(self.config.mesh or self.mesh))
            return resolve_sizes({axis: sizes.get(axis, 1) for axis in AXES}, devices)
        if self.config.mesh is not None or self.mesh.size != devices:
            raise ValueError(
                f"this script makes its own mesh, of {self.mesh.size} devices; let it give "
                "eqxshard.train the mesh as text, such as mesh='fsdp=-1', to plan others."
            )
        return {axis: self.mesh.shape[axis] for axis in AXES}

    def _batch_size(self, sizes: Mapping[str, int], *, may_stay: bool) -> int:
        """The batch size, rounded up if the script chose one that does not divide."""
        accumulate = self.training.accumulate
        devices = math.prod(sizes[axis] for axis in BATCH_AXES)
        parts, batch_size = devices * accumulate, self.config.batch_size
        users = any(re.match("--batch[-_]size", word) for word in sys.argv)
        if batch_size % parts == 0 or (users and may_stay):
            return batch_size
        over = format_sizes({axis: sizes[axis] for axis in BATCH_AXES})
        each = f" in {accumulate} parts each" if accumulate > 1 else ""
        says = f"--batch-size {batch_size} does not divide over {over} = {devices} devices"
        if users:
            nearest = nearest_multiples(batch_size, parts)
            raise ValueError(f"{says}{each}; use a multiple of {parts}, such as {nearest}.")
        rounded = batch_size + -batch_size % parts
        add_note(f"{says}{each}, so this is a plan for --batch-size {rounded}")
        return rounded


#: Called by `train` in place of training, with what it would train.
_planner: ContextVar[Callable[[PlannedRun], None] | None] = ContextVar(
    "eqxshard_planner", default=None
)


def end_with_plan(run: PlannedRun) -> NoReturn:
    """Plan a run that a script is about to start, and end the script."""
    planner = _planner.get()
    if planner is not None:
        planner(run)
    raise SystemExit(0)


@contextlib.contextmanager
def planned_by(planner: Callable[[PlannedRun, list[str]], None]) -> Iterator[None]:
    """Have the call of `train` that follows call a function, and end the script there.

    **Arguments:**

    - `planner`: called with the run, and with a list of what else to know of its plan.

    **Raises:**

    `ValueError` if `train` is not called; `SystemExit` if the script ends with an error.
    """
    script = sys.argv[0]
    is_called, failure = False, None
    with planning() as notes:

        def plan_once(run: PlannedRun) -> None:
            nonlocal is_called, failure
            is_called = True
            try:
                planner(run, notes)
            except Exception as error:
                failure = error
                raise

        token = _planner.set(plan_once)
        try:
            yield
        except SystemExit as end:
            if end.code:
                raise
        finally:
            _planner.reset(token)
    if failure is not None:
        raise failure  # The script caught it.
    if not is_called:
        raise ValueError(
            f"{script} does not call eqxshard.train, so there is nothing to plan; give a "
            "script that does, or use eqxshard.plan in Python."
        )


def plan_script(
    script: str | os.PathLike[str],
    options: Sequence[str],
    planner: Callable[[PlannedRun, list[str]], None],
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
        raise ValueError(f"there is no script {path}; give the path of one.")
    before = sys.argv, [*sys.path]
    sys.argv, sys.path[:] = [str(path), *options], [str(path.resolve().parent), *sys.path]
    try:
        with planned_by(planner):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def print_plan(text: str) -> Callable[[PlannedRun, list[str]], None]:
    """What `--plan 512xh200` asks for.

    **Raises:**

    `ValueError` if the text is not of this form.
    """
    count, device = parse_plan(text)

    def planner(run: PlannedRun, notes: list[str]) -> None:
        made = plan(**run.for_mesh(count), target=device)
        print(dataclasses.replace(made, notes=(*made.notes, *dict.fromkeys(notes))))

    return planner
