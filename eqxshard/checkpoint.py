"""`Checkpointer`: states on disk, that a run goes on from on any mesh."""

import contextlib
import importlib.metadata
import logging
import math
import operator
import os
import platform
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from ._checkpoint_folder import CheckpointFolder, listed
from ._leaves import check_same, describe, mesh_sizes, read, split_by_path, write
from .distributed import agree, from_first, gather, is_first
from .state import TrainState, unflatten_state

_T = TypeVar("_T")

_LOG = logging.getLogger(__name__)

_PACKAGES = ("jax", "equinox", "optax", "orbax-checkpoint")


class Checkpointer:
    """Keeps the states of a run in a folder, and gives them back on any mesh.

    A checkpoint is the folder `directory/STEP`: the state's arrays as
    [Orbax](https://orbax.readthedocs.io) writes them, by their paths; a readable
    `description.json` (paths, shapes, types, mesh, versions, the loader's position, the
    metrics); and `checksums.txt`, the SHA-256 of every file, which comes last: a folder
    without it is one whose writing was cut short, and does not count.

    Saving waits for the state's step and for the copy of its arrays from the devices.
    The rest happens in a thread, while training goes on. If it fails, say because the disk
    is full, the run goes on, the older checkpoints stay, and the error is logged.

    **Arguments:**

    - `directory`: a folder, which is made if need be, or a path such as `gs://...`, of
        this run alone.
    - `keep`: how many checkpoints to keep: the last ones.
    - `every`: save every so many steps.
    - `every_seconds`: save at the first report of [`eqxshard.fit`][] after so many
        seconds, 10 minutes by default; `None` for never.
    - `best`: the name of a metric that `fit` reports, such as `"eval/accuracy"`: the
        checkpoint where it was best is kept, too.
    - `mode`: whether the best is the largest (`"max"`) or the smallest (`"min"`).

    **Raises:**

    `ValueError` if one of the numbers is not positive, or `mode` is not known.

    !!! Example

        ```python
        checkpointer = eqxshard.Checkpointer("runs/checkpoints", every=1000)
        if checkpointer.steps():
            state = checkpointer.restore(like)
        state = eqxshard.fit(
            state, train_step, loader, epochs=10, checkpointer=checkpointer
        )
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        every: int | None = None,
        every_seconds: float | None = 600.0,
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
    ):
        numbers = {"keep": keep, "every": every, "every_seconds": every_seconds}
        for name, value in numbers.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} is too few; use 1 or more.")
        if mode not in ("max", "min"):
            raise ValueError(f"mode={mode!r} is not known; use 'max' or 'min'.")
        self._folder = CheckpointFolder(directory)
        self.directory = self._folder.path
        self._keep = operator.index(keep)
        #: Save every so many steps, or `None`.
        self.every = None if every is None else operator.index(every)
        self._every_seconds = every_seconds
        self._best = best
        self._mode = mode
        self._last = time.monotonic()
        self._cleaned = False
        # One thread, so that saves follow each other; made when it is first needed.
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._error: OSError | None = None

    def steps(self) -> list[int]:
        """The steps that there are finished checkpoints of, in order."""
        return self._folder.steps()

    def best_step(self) -> int | None:
        """The step whose checkpoint has the best value of `best`, if any has one."""
        if self._best is None:
            return None
        sign = 1 if self._mode == "max" else -1
        values = {}
        for step in self._folder.good_steps():
            # Not all of it is checked here, and damage is no reason to end a run.
            try:
                values[step] = sign * self._folder.described(step)["metrics"][self._best]
            except (ValueError, LookupError, TypeError):
                continue
        # The latest of equals.
        return max(values, key=lambda step: (values[step], step), default=None)

    def description(self, step: int) -> dict[str, Any]:
        """What the checkpoint of a step says of itself.

        **Arguments:**

        - `step`: one of [`eqxshard.Checkpointer.steps`][].

        **Returns:**

        What `description.json` holds: `step`, `leaves` (shape, type and spec of each, by
        path), `mesh`, `loader`, `metrics`, `versions`.

        **Raises:**

        `FileNotFoundError` if there is no such checkpoint; `ValueError` if it is damaged.
        """
        return self._folder.check(step)

    def restore(self, like: _T, *, step: int | None = None) -> _T:
        """Read a state, each array straight to where it will lie.

        Every file is checked first. If the newest checkpoint is damaged, that is logged,
        and the one before it is used.

        **Arguments:**

        - `like`: a state like the one to read, such as from
            [`eqxshard.abstract_state`][]: its arrays, or what stands for them, say of
            which type and where those will be that are read. Mesh, rule and floating-point
            types may be others than they were. Not donated.
        - `step`: the step whose checkpoint to read; the newest by default.

        **Returns:**

        A state like `like`, with the values that were saved.

        **Raises:**

        `FileNotFoundError` if there is no checkpoint. `ValueError` if none is undamaged,
        or `like` has other arrays than the checkpoint: it names each that is missing,
        that is too many, or that has another shape.
        """
        step, described = self._folder.choose(step)
        wanted, skeleton = split_by_path(like)
        check_same(wanted, described["leaves"], self._folder.in_words(step))
        values = list(read(self._folder.at(step), wanted).values())
        self._last = time.monotonic()
        if isinstance(like, TrainState):
            return unflatten_state(values, skeleton.shaped(values))  # pyright: ignore
        return skeleton.merge(values)

    def restore_model(
        self, model: _T, *, step: int | None = None, only: PyTree = True
    ) -> _T:
        """Read the model of a state, or a part of it: for evaluation, or fine-tuning.

        **Arguments:**

        - `model`: a model like the one to read, of arrays or of
            `jax.ShapeDtypeStruct`s, which say where the arrays will lie.
        - `step`: the step whose checkpoint to read; the newest by default.
        - `only`: which of the model's arrays to read: a filter spec as for
            `equinox.partition`. The others stay as they are in `model`, and may be of
            other shapes than in the checkpoint, such as those of a new last layer.

        **Returns:**

        A model like `model`, with the values that were saved.

        **Raises:**

        As [`eqxshard.Checkpointer.restore`][] does; it is no error if the checkpoint has
        more arrays.

        !!! Example

            ```python
            everything = jax.tree.map(lambda _: True, model)
            body = eqx.tree_at(lambda model: model.head, everything, False)
            model = checkpointer.restore_model(model, only=body)
            ```
        """
        step, described = self._folder.choose(step)
        chosen, rest = eqx.partition(model, only)
        wanted, skeleton = split_by_path(chosen, "model")
        saved = {k: leaf for k, leaf in described["leaves"].items() if k in wanted}
        check_same(wanted, saved, self._folder.in_words(step))
        arrays = read(self._folder.at(step), wanted)
        return eqx.combine(skeleton.merge(list(arrays.values())), rest)

    def check_start(self, step: int, loader: Any) -> None:
        """Refuse to start a run where its checkpoints would mix with another's.

        **Arguments:**

        - `step`: the step that the run starts from.
        - `loader`: its [`eqxshard.Loader`][].

        **Raises:**

        `ValueError` if the directory cannot be written to, has checkpoints of later steps
        or other things with numbers for names, or that of this step was made with a
        loader of other batches.
        """
        alike = {"directory": str(self.directory), "first step": step}
        alike |= {"every": self.every, "best": self._best}
        agree("run", alike | {"timed": self._every_seconds is not None})
        fault = from_first(self._folder.claim() if is_first() else None)
        if fault is not None:
            raise ValueError(fault)
        # A folder that the hosts do not share looks different to each.
        agree("run", {"checkpoints": self.steps()})
        steps = self._folder.good_steps()
        if steps and steps[-1] > step:
            raise ValueError(
                f"{self.directory} has a checkpoint of step {steps[-1]}, and the run "
                f"starts from step {step}; restore that one to go on, or give the run "
                "another directory."
            )
        if step in steps:
            position = self._folder.described(step)["loader"]
            # Other loaders than ours may have no position but the step.
            if position is not None and hasattr(loader, "restore"):
                loader.restore(position)

    def due(self, step: int, *, reporting: bool) -> bool:
        """Whether it is time to save: by steps, or by seconds if this is a report."""
        if self.every is not None and step % self.every == 0:
            return True
        if not reporting or self._every_seconds is None:
            return False
        # Clocks differ, and all processes must save alike.
        return from_first(time.monotonic() - self._last >= self._every_seconds)

    def save(
        self,
        state: TrainState,
        *,
        loader: Any = None,
        metrics: Mapping[str, float] = {},
    ) -> None:
        """Save a state, and go on before it is written.

        A state that has NaN in it is not saved, nor one that there is a checkpoint of; a
        save that is still being written is waited for. Call
        [`eqxshard.Checkpointer.wait`][] before the program ends.

        **Arguments:**

        - `state`: not donated; it may be as soon as this returns.
        - `loader`: the [`eqxshard.Loader`][], for its position.
        - `metrics`: what was measured of this state, for `best`.
        """
        step = int(state.step)
        self.close()
        self._last = time.monotonic()
        self._error = None
        if from_first(step in self._folder.good_steps()):
            return
        leaves, _ = split_by_path(state)
        described = {
            "step": step,
            # JSON has no others.
            "metrics": {k: float(v) for k, v in metrics.items() if math.isfinite(v)},
            # The step's, whatever else the loader has been used for.
            "loader": {**loader.state(), "step": step}
            if hasattr(loader, "state")
            else None,
            "mesh": mesh_sizes(leaves),
            "versions": _versions(),
            "leaves": {path: describe(leaf) for path, leaf in leaves.items()},
        }
        # Read when all is written: who asks now waits for the step.
        lost = _has_nan(eqx.filter(state, eqx.is_array))
        fault = from_first(self._make_room(step) if is_first() else None)
        try:
            if fault is not None:
                raise OSError(fault)
            response = write(self._folder.at(step), leaves)
        # Whatever it is that keeps a checkpoint from being written, training goes on.
        except Exception as error:
            self._failed(step, error)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "eqxshard-checkpoint")
        self._pending = self._thread.submit(self._finish, response, described, lost)

    def _make_room(self, step: int) -> str | None:
        """Make sure that nothing is where a step is to be saved; why that failed, if so."""
        fault = self._folder.claim()
        if fault is not None:
            return fault
        try:
            if not self._cleaned:
                self._folder.clean()
                self._cleaned = True
            self._folder.remove(step)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def close(self) -> None:
        """Wait until all that was saved is written, whether or not it could be."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def wait(self) -> None:
        """Wait until all that was saved is written.

        **Raises:**

        `OSError` if the last of it could not be written.
        """
        self.close()
        errors = [error for error in gather(str(self._error or "")) if error]
        if errors:
            raise OSError(errors[0])

    def _finish(self, response: Any, described: dict[str, Any], lost: Array) -> None:
        step = described["step"]
        try:
            response.result()
            if not is_first():
                return
            if bool(lost):
                self._folder.remove(step)
                _LOG.error(
                    "the state of step %d has NaN in it and was not saved; the newest "
                    "checkpoint is: %s.",
                    step,
                    listed(self.steps()[-1:]),
                )
                return
            self._folder.finish(described)
            good = self._folder.good_steps()
            self._folder.keep_only({*good[-self._keep :], step, self.best_step()})
        except Exception as error:
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        others = listed([there for there in self.steps() if there != step][-1:])
        says = (
            f"the checkpoint of step {step} could not be written to {self.directory}: "
            f"{why}; the newest one is: {others}."
        )
        self._error = OSError(says)
        _LOG.error("%s The run goes on.", says)
        # In a folder that could not be made ours, nothing is to be removed.
        if not self._cleaned:
            return
        # What there is of it takes space, of which there may be none.
        with contextlib.suppress(OSError):
            self._folder.clean()


def _versions() -> dict[str, str]:
    # Not by an import, as this module is a part of it.
    version = sys.modules["eqxshard"].__version__
    ours = {"python": platform.python_version(), "eqxshard": version}
    return ours | {name: importlib.metadata.version(name) for name in _PACKAGES}


@jax.jit
def _has_nan(tree: PyTree) -> Bool[Array, ""]:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.any(jnp.stack([jnp.any(jnp.isnan(x)) for x in leaves] or [jnp.array(False)]))
