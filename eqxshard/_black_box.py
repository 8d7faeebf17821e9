"""What is needed to look for the cause of a step that was not finite, written down."""

import dataclasses
import inspect
import io
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ._leaves import describe, read, split_by_path, stand_in, write
from ._sealed import find_damage, is_sealed, seal
from .distributed import barrier, is_first
from .state import TrainState, with_state

_DESCRIPTION, _PROGRAM = "description.json", "program.pickle"


class _Array:
    """Stands in a PyTree for the array of a path."""

    def __init__(self, path: str):
        self.path = path


class BlackBox(NamedTuple):
    """A step that was not finite: all that its loss was computed from."""

    steps: list[int]
    #: The places in the source of the batch's examples.
    rows: list[int] | None
    model: PyTree
    batch: PyTree
    key: Any
    loss_fn: Any
    precision: Any
    trainable: PyTree


def write_black_box(
    folder: Any,
    state: TrainState,
    steps: Sequence[int],
    batch: PyTree,
    train_step: Any,
    loader: Any,
) -> None:
    """Write down the first of several steps that were not finite.

    **Arguments:**

    - `folder`: an `etils.epath.Path`; what is there is replaced.
    - `state`: the state of the run, whose parameters such steps have left as they were.
    - `steps`: the numbers of the steps, counted from 1.
    - `batch`: the batch of the first of them.
    - `train_step`: an [`eqxshard.TrainStep`][], for its loss function.
    - `loader`: what made the batch.
    """
    key = jax.random.fold_in(state.key, steps[0] - 1)
    made = {"model": with_state(state.model, state.model_state), "batch": batch, "key": key}
    leaves, skeleton = split_by_path(made)
    if is_first():
        if folder.exists():
            folder.rmtree()
        folder.parent.mkdir(parents=True, exist_ok=True)
    barrier("black box")
    write(folder, leaves).result()
    if not is_first():
        return
    rows = getattr(loader, "rows", None)
    described = {
        "steps": list(steps),
        # Where the modules are that the loss function is from.
        "path": sys.path,
        "rows": None if rows is None else np.asarray(rows(steps[0] - 1)).tolist(),
        "leaves": {path: describe(leaf) for path, leaf in leaves.items()},
    }
    (folder / _DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n")
    update = train_step.update
    program = {
        "made": skeleton.merge([_Array(path) for path in leaves]),
        "loss_fn": update.loss_fn,
        "precision": update.precision,
        "trainable": update.trainable,
    }
    (folder / _PROGRAM).write_bytes(_dumps(program))
    seal(folder)


def read_black_box(folder: Any) -> BlackBox:
    """Read what `write_black_box` wrote, onto one device.

    **Raises:**

    `FileNotFoundError` if it is not there; `ValueError` if it is damaged.
    """
    import cloudpickle

    if not is_sealed(folder):
        raise FileNotFoundError(
            f"{folder} is no black box; give the folder that the run named."
        )
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(f"the black box {folder} is damaged: {damage}.")
    described = json.loads((folder / _DESCRIPTION).read_text())
    sys.path += [path for path in described["path"] if path not in sys.path]
    program = cloudpickle.loads((folder / _PROGRAM).read_bytes())
    wanted = {path: stand_in(leaf) for path, leaf in described["leaves"].items()}
    arrays = read(folder, wanted)
    made = jax.tree.map(
        lambda leaf: arrays[leaf.path] if isinstance(leaf, _Array) else leaf,
        program["made"],
    )
    return BlackBox(
        described["steps"],
        described["rows"],
        made["model"],
        made["batch"],
        made["key"],
        program["loss_fn"],
        program["precision"],
        program["trainable"],
    )


def _dumps(program: Any) -> bytes:
    # Functions and modules of a script cannot be imported again, so plain pickle refuses
    # them.
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:  # pyright: ignore
            if isinstance(obj, Mesh):
                return _one_device, (obj.axis_names,)
            reduced = super().reducer_override(obj)
            is_module = isinstance(obj, type) and issubclass(obj, eqx.Module)
            if reduced is NotImplemented or not is_module:
                return reduced
            make, arguments, *rest = reduced
            own = inspect.get_annotations(obj)
            fields = [field for field in dataclasses.fields(obj) if field.name in own]
            static = {field.name: field.metadata.get("static", False) for field in fields}
            return _make_module_class, (make, arguments, static), *rest

    file = io.BytesIO()
    Pickler(file).dump(program)
    return file.getvalue()


def _one_device(axis_names: tuple[str, ...]) -> Mesh:
    """A mesh with the axes of another: a step is replayed on one device."""
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axis_names)), axis_names)


def _make_module_class(make: Any, arguments: Any, static: dict[str, bool]) -> type:
    """Make the class of a module as cloudpickle does, but with its fields from the start.

    Equinox makes a PyTree of it there and then; cloudpickle sets annotations afterwards.
    """
    metaclass, name, bases, namespace, *rest = arguments
    fields = {
        # With a default, which may follow others that have one.
        field: eqx.field(static=is_static, default_factory=lambda: None)
        for field, is_static in static.items()
    }
    namespace = namespace | {"__annotations__": dict.fromkeys(fields, Any)} | fields
    return make(metaclass, name, bases, namespace, *rest)
