"""A script that is planned: run up to its call of `train`, whose arguments are a plan's."""

import contextlib
import functools
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.sharding import Mesh

from ..data._host import HostBatches
from ..data._planning import is_planning, planning
from ..data._samplers import Order
from ..debug._script import refuse_import
from ..sharding._leaf_rules import replicate
from ..sharding._mesh import AXES, BATCH_AXES, resolve_sizes
from ..sharding._spec import format_sizes
from ..sharding._text import nearest_multiples
from ._config import RunConfig, last_step, optim_for
from ._devices import complete_mesh, parse_mesh

_Train = TypeVar("_Train", bound=Callable[..., Any])

#: The arguments that `train` and `plan` share.
_SHARED = ("make_model", "loss_fn", "trainable", "precision", "accumulate", "nonfinite")
_SHARED += ("grad_norms",)


class Collected(NamedTuple):
    """What a script trains.

    - `arguments`: for [`eqxshard.plan`][], other than its target.
    - `notes`: what else to know.
    """

    arguments: dict[str, Any]
    notes: tuple[str, ...]


class ScriptReady(BaseException):
    """Ends a script at its call of `cli`; `run` goes on from there, with other options."""

    def __init__(self, run: Callable[[Sequence[str]], None]):
        self.run = run


class _Stop(BaseException):
    """Ends a script at its call of `train`; scripts catch every `Exception`."""

    def __init__(self, given: Mapping[str, Any]):
        self.given = given


def can_be_planned(train: _Train) -> _Train:
    """Have `train` end the script with its arguments, while the script is planned."""
    signature = inspect.signature(train)

    @functools.wraps(train)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        refuse_import("eqxshard.train")
        if is_planning():
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            raise _Stop(given.arguments)
        return train(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


@contextlib.contextmanager
def collect(
    script: str | os.PathLike[str],
    options: Sequence[str],
    *,
    devices: int,
    mesh: bool = True,
) -> Iterator[Collected]:
    """Run a script up to its call of [`eqxshard.train`][], and collect what it trains.

    As `collect_all`, for one list of options.
    """
    given = collect_all(script, [options], devices=devices, mesh=mesh)
    with given as ([arguments], notes):
        yield Collected(arguments, notes)


@contextlib.contextmanager
def collect_all(
    script: str | os.PathLike[str],
    variants: Sequence[Sequence[str]],
    *,
    devices: int,
    mesh: bool = True,
) -> Iterator[tuple[list[dict[str, Any]], tuple[str, ...]]]:
    """Run a script up to its call of [`eqxshard.train`][], once for each of some options.

    Inside of the context the script is `__main__`, so that what it defines can be sent to
    other processes. It yields the arguments of each, and the notes of all.

    **Arguments:**

    - `script`: its path.
    - `variants`: options of its command line; several if it calls [`eqxshard.cli`][].
    - `devices`: how many to plan for.
    - `mesh`: whether the arguments have `devices` and `mesh_shape`, over which the batch
        must divide.

    **Raises:**

    `ValueError` if there is no such script, it does not call `train`, or its mesh or its
    batch size does not suit the devices; `SystemExit` if it ends with an error.
    """
    path = Path(script)
    if not path.is_file():
        raise ValueError(f"there is no script {path}; give the path of one.")
    if devices < 1:
        raise ValueError(f"--devices {devices} is too small; use 1 or more.")
    with _as_main(path, variants[0]) as module, planning() as notes:
        run = _load(path, module, len(variants))
        found = [
            _arguments(
                _given(path, run, options),
                *(devices, mesh, _gives_batch_size(options), notes),
            )
            for options in variants
        ]
        yield found, tuple(dict.fromkeys(notes))


@contextlib.contextmanager
def _as_main(path: Path, options: Sequence[str]) -> Iterator[types.ModuleType]:
    """A module that takes the place of the script that runs."""
    module = types.ModuleType("__main__")
    module.__file__ = str(path.resolve())
    before = sys.modules["__main__"], sys.argv, [*sys.path]
    sys.modules["__main__"], sys.argv = module, [str(path), *options]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield module
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before


def _load(
    path: Path, module: types.ModuleType, variants: int
) -> Callable[[Sequence[str]], None]:
    """Run a script up to its call of `cli` or `train`; return what goes on from there."""

    def stop_again(_: Sequence[str]) -> None:
        raise stopped

    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except ScriptReady as ready:
        return ready.run
    except _Stop as stop:
        if variants > 1:
            raise ValueError(
                f"{path} calls eqxshard.train without eqxshard.cli, so its options cannot "
                "be varied; leave --vary out, or have eqxshard.cli read the options."
            ) from None
        stopped = stop
        return stop_again
    except SystemExit as end:
        if end.code:
            raise
    return lambda options: None


def _given(
    path: Path, run: Callable[[Sequence[str]], None], options: Sequence[str]
) -> Mapping[str, Any]:
    """The arguments of the call of `train` that a script makes with some options."""
    try:
        run(options)
    except _Stop as stop:
        return stop.given
    except SystemExit as end:
        if end.code:
            raise
    raise ValueError(
        f"{path} does not call eqxshard.train, so there is nothing to plan; give a script "
        "that does, or use eqxshard.plan in Python."
    )


def _arguments(
    given: Mapping[str, Any],
    devices: int,
    mesh: bool,
    keeps_batch_size: bool,
    notes: list[str],
) -> dict[str, Any]:
    """The arguments of `plan`, from those of `train`."""
    config = given["config"] or RunConfig()
    config.check()
    sizes = _mesh_sizes(config, given["mesh"], devices)
    parts = math.prod(sizes[axis] for axis in BATCH_AXES) * given["accumulate"]
    batch_size = config.batch_size
    if batch_size % parts and (mesh or not keeps_batch_size):
        text = _not_divided(batch_size, sizes, given["accumulate"], parts)
        if keeps_batch_size:
            nearest = nearest_multiples(batch_size, parts)
            raise ValueError(f"{text}; use a multiple of {parts}, such as {nearest}.")
        batch_size += -batch_size % parts
        notes.append(f"{text}, so this is a plan for --batch-size {batch_size}")
    source = given["train_data"]
    batches = HostBatches(
        source,
        Order(len(source), sampler=given["sampler"]),
        batch_size=batch_size,
        seed=config.seed,
        fills=given["remainder"] == "pad",
        transform=given["transform"],
        positions=np.arange(1),
    )
    epoch = max(batches.length, 1)
    return {name: given[name] for name in _SHARED} | {
        "optim": optim_for(
            given["make_optim"], last_step(config, given["epochs"], given["steps"], epoch)
        ),
        "batch": batches.shapes(),
        "rule": given["rule"] or replicate(),
        **({"devices": devices, "mesh_shape": sizes} if mesh else {}),
    }


def _mesh_sizes(config: RunConfig, mesh: str | Mesh, devices: int) -> dict[str, int]:
    if isinstance(mesh, str):
        sizes = complete_mesh(parse_mesh(config.mesh or mesh))
        return resolve_sizes({axis: sizes.get(axis, 1) for axis in AXES}, devices)
    if config.mesh is not None or mesh.size != devices:
        raise ValueError(
            f"this script makes its own mesh, of {mesh.size} devices; let it give "
            "eqxshard.train the mesh as text, such as mesh='fsdp=-1', to plan others."
        )
    return {axis: mesh.shape[axis] for axis in AXES}


def _not_divided(
    batch_size: int, sizes: Mapping[str, int], accumulate: int, parts: int
) -> str:
    over = format_sizes({axis: sizes[axis] for axis in BATCH_AXES})
    each = f" in {accumulate} parts each" if accumulate > 1 else ""
    return (
        f"--batch-size {batch_size} does not divide over {over} = {parts // accumulate} "
        f"devices{each}"
    )


def _gives_batch_size(options: Sequence[str]) -> bool:
    """Whether the batch size is the user's, and not the script's."""
    flags = {option.partition("=")[0].replace("_", "-") for option in options}
    return "--batch-size" in flags
