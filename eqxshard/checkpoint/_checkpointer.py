"""`Checkpointer`: states on disk, to resume from on any mesh."""

import contextlib
import logging
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
from jaxtyping import Array, PyTree

from .._errors import UsageError, UsageFileError
from ..distributed import (
    assert_same_on_all_processes,
    broadcast_from_first,
    is_main_process,
)
from ..training._advice import explaining_state
from ..training._donation import check_state_not_donated
from ..training._state import step_of, trained_paths, with_state, without_state
from ..transforms._partition import Static
from ._agree import on_first
from ._arrays import partition_by_path, read, wrap_keys
from ._folder import CheckpointFolder, Mode, Step, best_mode, best_of
from ._manifest import describe
from ._match import Changed, Changes, Missing, Unused, fill
from ._writer import CheckpointWriter

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")


class Checkpointer:
    """Saves the states of a run in a folder, and restores them onto any mesh.

    A checkpoint is the folder `directory/STEP`: the state's arrays by path, as
    [TensorStore](https://google.github.io/tensorstore) reads them, each chunk with its
    CRC-32C; a readable `description.json` (paths, shapes, dtypes, mesh, the loader's
    position, the metrics); and `checksums.txt`, which is written last: a folder without it
    was interrupted, and does not count. It has the SHA-256 of every other file, or of large
    files of arrays the size.

    Saving waits for the state's step and for the copy of its arrays from the devices; a
    thread does the rest while training continues. If it fails, say because the disk is
    full, the error is logged, and the older checkpoints stay.

    **Arguments:**

    - `directory`: a folder for this run alone, created if necessary; or the address of one
        in an object store, `s3://...` or `gs://...`.
    - `max_to_keep`: how many checkpoints to keep: the newest ones.
    - `save_every`: save every this many steps.
    - `save_every_seconds`: save at the first report of [`eqxshard.fit`][] after this
        many seconds, 10 minutes by default; `None` for never.
    - `best`: the name of a metric that `fit` reports, such as `"eval/loss"`: `fit` saves
        after each evaluation that is better than all before, and the best checkpoint (the
        first of equals) is kept, too.
    - `mode`: whether the smallest (`"min"`) or the largest (`"max"`) value is best. By
        default the smallest for a loss, an error or a perplexity, and the largest for an
        accuracy, by the last word of the name; other metrics need it.

    **Raises:**

    `ValueError` if one of the numbers is not positive, `mode` is unknown, or missing where
    the name does not tell, or the folder has a name that cannot be written here.

    !!! Example

        ```python
        checkpointer = eqxshard.Checkpointer("runs/checkpoints", save_every=1000)
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
        max_to_keep: int = 3,
        save_every: int | None = None,
        save_every_seconds: float | None = 600.0,
        best: str | None = None,
        mode: Mode | None = None,
    ):
        for number in (max_to_keep, save_every, save_every_seconds):
            if number is not None and not number > 0:
                raise UsageError(
                    f"max_to_keep={max_to_keep}, save_every={save_every}, "
                    f"save_every_seconds={save_every_seconds}: {number} is not positive; "
                    "give a larger number, or None for never."
                )
        self._mode: Mode = best_mode("loss" if best is None else best, mode)
        self._folder = CheckpointFolder(directory)
        self.directory = self._folder.path  #: The folder, as an `etils.epath.Path`.
        self._max_to_keep = operator.index(max_to_keep)
        #: Save every this many steps, if not `None`.
        self.save_every = save_every and operator.index(save_every)
        self._save_every_seconds = save_every_seconds
        self._best = best
        self._last_save = time.monotonic()
        self._renamed: list[Mapping[str, str | None]] = []
        self._writer = CheckpointWriter(self._folder, self._outdated)

    def steps(self) -> list[int]:
        """The steps with complete checkpoints, in order."""
        return self._folder.steps()

    def best_step(self) -> int | None:
        """The step with the best value of `best`, the first of equals.

        `None` if no checkpoint has a value.
        """
        return best_of(self._values(self._folder.good_steps()), self._mode)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True if metrics are better, by `best`, than those of every checkpoint.

        [`eqxshard.fit`][] asks after each evaluation, to save.

        **Raises:**

        `ValueError` if the metrics are those of an evaluation, and `best` is not among
        them.
        """
        if self._best is None:
            return False
        if self._best not in metrics and any(name.startswith("eval/") for name in metrics):
            raise UsageError(
                f"best={self._best!r} is not a metric of this run; use one of "
                f"{', '.join(metrics)}."
            )
        # It may be a scalar of JAX.
        value = float(metrics.get(self._best, math.nan))
        for _ in range(2):
            values: dict[int, float] = {}
            # Not only OSError: packages for object stores have errors of their own.
            with contextlib.suppress(Exception):
                values = self._values(self._folder.good_steps())
            # The first of equals is best, so this has to be better than those saved.
            better = best_of({**values, sys.maxsize: value}, self._mode) == sys.maxsize
            # Processes may see a shared folder at different times.
            if not broadcast_from_first(math.isfinite(value) and better):
                return False
            # The checkpoint that is being written may be better.
            self._writer.settle()
        return True

    def description(self, step: int) -> dict[str, Any]:
        """The description of a checkpoint.

        **Arguments:**

        - `step`: one of [`eqxshard.Checkpointer.steps`][].

        **Returns:**

        The contents of `description.json`: `step`, `leaves` (shape, dtype and spec of
        each, by path), `mesh`, `loader`, `metrics`, `callbacks`.

        **Raises:**

        `FileNotFoundError` if there is no such checkpoint; `ValueError` if it is damaged.
        """
        return self._folder.description(step)

    def restore(
        self,
        like: _T,
        *,
        step: Step = "newest",
        rename: Mapping[str, str | None] = {},
        missing: Missing = "error",
        unused: Unused = "error",
    ) -> _T:
        """Read a state, each array straight into its sharding.

        Each process verifies what it reads. If any finds the newest checkpoint damaged,
        that is logged, and all use the one before it. What is renamed, initialized or
        dropped is logged.

        **Arguments:**

        - `like`: a state, or a PyTree of several, such as from
            [`eqxshard.abstract_state`][], whose arrays (or `jax.ShapeDtypeStruct`s) give
            dtypes and shardings; the mesh may be another one. Not donated.
        - `step`: the step to read; by default the newest. `None`, which `best_step` may
            return, is an error.
        - `rename`: the new path for what was saved at a path or below it, such as
            `{"model.blocks": "model.layers"}`, or `None` to drop it. What the optimizer
            keeps for a parameter moves with it. A script may keep the line: it has no
            effect on checkpoints that this checkpointer saves afterwards.
        - `missing`: `"init"` copies what the checkpoint lacks from `like`, a state of
            [`eqxshard.init_state`][]. A schedule that is new counts its steps from 0.
            (For an optimizer that begins with a copy of the weights, such as
            [`eqxshard.ema_weights`][], make it with `load=checkpointer.restore_model`.)
        - `unused`: `"drop"` drops arrays that `like` does not have.

        **Returns:**

        A state like `like`, with the values that were saved.

        **Raises:**

        `FileNotFoundError` if there is no checkpoint, or `step` is `None`. `OSError` if the
        files cannot be read, even after some tries. `ValueError` if all are damaged, or
        `like` does not have the same arrays: it names each that is missing, superfluous or
        of another shape, and what to write if that is intended.

        !!! Example

            ```python
            like = eqxshard.init_state(make_model, new_optim, key=key, mesh=mesh, rule=rule)
            state = checkpointer.restore(like, missing="init", unused="drop")
            ```
        """
        return self.restore_or_make(like, Changes(rename, missing, unused), step=step)

    def restore_or_make(
        self,
        like: _T,
        changes: Changes,
        make: Callable[[dict[str, Array]], _T] | None = None,
        *,
        step: Step = "newest",
    ) -> _T:
        """As `restore`, but arrays that are missing may be made; `eqxshard.train` uses it.

        **Arguments:**

        - `like`, `step`: as for `restore`.
        - `changes`: the changes that are allowed.
        - `make`: makes a state from the arrays that were read, by path, if others are
            missing; by default, the others are copied from `like`.
        """
        with explaining_state({"in all": like}):
            found = self._read(like, step, changes)
        state: Any = None
        if make is not None and len(found.arrays) < len(found.wanted):
            state = make(found.arrays)
        else:
            arrays = fill(found.arrays, found.wanted, found.where)
            state = found.static.combine([*arrays.values()])
        _log(found.where, found.changed)
        self._renamed = found.renamed
        self._last_save = time.monotonic()
        return state

    def restore_model(
        self,
        model: _T,
        *,
        step: Step = "newest",
        only: PyTree = True,
        of: str = "",
        rename: Mapping[str, str | None] = {},
        missing: Missing = "error",
    ) -> _T:
        """Read the model of a state, or a part of it, for evaluation or fine-tuning.

        **Arguments:**

        - `model`: a model like the one to read, of arrays or of
            `jax.ShapeDtypeStruct`s, which give dtypes and shardings; if it has a state
            (`BatchNorm`), the pair `(model, model_state)`.
        - `step`: the step whose checkpoint to read; the newest by default.
        - `only`: which of the model's arrays to read: a filter spec as for
            `equinox.partition`. The others stay as they are in `model`, and may have
            other shapes than in the checkpoint, such as those of a new last layer.
        - `of`: the path of its state, such as `"generator"`, if several were saved.
        - `rename`: as for [`eqxshard.Checkpointer.restore`][].
        - `missing`: `"init"` leaves what the checkpoint lacks as it is in `model`.

        **Returns:**

        A model, or pair, like `model`, with the values that were saved.

        **Raises:**

        As [`eqxshard.Checkpointer.restore`][] does, but the checkpoint may have more
        arrays.

        !!! Example

            ```python
            everything = jax.tree.map(lambda _: True, model)
            body = eqx.tree_at(lambda model: model.head, everything, False)
            model = checkpointer.restore_model(model, only=body)
            ```
        """
        chosen, rest = eqx.partition(model, only)
        # Under the names that they have in a state.
        like = dict(zip(("model", "model_state"), without_state(chosen)))
        found = self._read(like, step, Changes(rename, missing, "drop"), of)
        arrays = {**found.wanted, **found.arrays}
        _log(found.where, found.changed._replace(dropped=[]))
        read: Any = found.static.combine([*arrays.values()])
        return eqx.combine(with_state(read["model"], read["model_state"]), rest)

    def _read(self, like: PyTree, step: Step, changes: Changes, root: str = "") -> "_Found":
        """Read the arrays of a PyTree, whose path in the saved state is `root`."""
        if step is None:
            raise UsageFileError(
                f"no checkpoint in {self.directory} has a value of best={self._best!r}; "
                "give the checkpointer the name of a metric that was saved, or leave out "
                "step= to read the newest."
            )
        wanted, static = partition_by_path(like, root)
        # Until no process finds damage in what it reads.
        while True:
            description = self._folder.choose(step)
            at, saved, done = (description[name] for name in ("step", "leaves", "renamed"))
            where = self._folder.name(at)
            sources, changed = changes.match(wanted, saved, done, where)
            leaves = {old: wanted[new] for new, old in sources.items()}
            arrays = self._folder.read(at, partial(read, self._folder.at(at), leaves))
            if arrays is not None:
                break
        arrays = wrap_keys(arrays, leaves)
        arrays = {new: arrays[old] for new, old in sources.items()}
        if changes.rename and changes.rename not in done:
            done = [*done, dict(changes.rename)]
        return _Found(where, wanted, static, arrays, changed, done)

    def claim_run(self, step: int, loader: Any) -> Mapping[str, Any]:
        """Claim the directory for a run, unless its checkpoints would mix with another's.

        The directory is created, marked as ours, and locked for other programs until
        `close`, or the end of this process. If it has a checkpoint of this step, the loader
        is moved to where it was then. [`eqxshard.fit`][] calls this.

        **Arguments:**

        - `step`: the step that the run starts from.
        - `loader`: the run's [`eqxshard.Loader`][]; one without `restore` is left alone.

        **Returns:**

        The states of the callbacks in that checkpoint, if there is one.

        **Raises:**

        `ValueError` if the directory is not writable, or in use, has checkpoints of later
        steps or other things with numbers for names, or its checkpoint of this step belongs
        to a loader with other batches.
        """
        when = [self.save_every, self._best, self._save_every_seconds is not None]
        facts = {"directory": str(self.directory), "first step": step, "saves": when}
        assert_same_on_all_processes("run", facts)
        self._folder.lock.claims += 1
        self._folder.claim_from(step)
        if step not in self._folder.good_steps():
            return {}
        description = self._folder.description(step)
        # A loader of the user's own may have no position.
        if description["loader"] is not None and hasattr(loader, "restore"):
            loader.restore(description["loader"])
        return description["callbacks"]

    def start_over(self) -> None:
        """Remove the checkpoints of an earlier run, for one that starts from step 0.

        Files that were not written by this library stay.

        **Raises:**

        `ValueError`, before anything is removed, if the directory is not writable, is in
        use, has a checkpoint that is a link or was not written here, or was not claimed by
        a run and has other things with numbers for names; and if a checkpoint cannot be
        removed.
        """
        on_first(self._start_over)

    def _start_over(self) -> None:
        self._folder.claim()
        steps, ours = self.steps(), self._folder.own_steps()
        if steps != ours:
            raise UsageError(
                f"{self.directory} has the checkpoint of step {min({*steps} - {*ours})}, "
                "which is a link or was not written here, and is not removed; move it "
                "away, or give the run another folder."
            )
        try:
            for step in ours:
                self._folder.remove(step)
        except OSError as error:
            raise UsageError(
                f"a checkpoint in {self.directory} cannot be removed: {error}"
            ) from error

    def should_save(self, step: int, *, reporting: bool) -> bool:
        """True if it is time to save.

        **Arguments:**

        - `step`: the number of steps taken.
        - `reporting`: whether `save_every_seconds` applies at this step. (All
            processes must ask at the same steps, so `fit` asks when it reports.)
        """
        if self.save_every and step % self.save_every == 0:
            return True
        if not reporting or self._save_every_seconds is None:
            return False
        # Clocks differ, and all processes must save together.
        seconds = time.monotonic() - self._last_save
        return broadcast_from_first(seconds >= self._save_every_seconds)

    def save(
        self,
        state: PyTree,
        *,
        loader: Any = None,
        metrics: Mapping[str, float] = {},
        callbacks: Mapping[str, Any] = {},
    ) -> None:
        """Save a state; return before it is written.

        A state that contains NaN is not saved, nor one with infinite trained parameters
        (other than minus infinity, as in masks), nor one whose step has a checkpoint
        already. If the last save is still being written, this waits for it first. Call
        `wait` before the program ends.

        **Arguments:**

        - `state`: a state, or a PyTree of several at the same step, such as a dict. Not
            donated here; it may be donated as soon as this returns.
        - `loader`: the [`eqxshard.Loader`][], whose position, `loader.state()`, is saved:
            that of the batch after the last one that was read, however many a step takes.
        - `metrics`: the metrics of this state, for `best`.
        - `callbacks`: what the run's callbacks need to continue, as JSON values.

        **Raises:**

        `ValueError` if the state was donated, or two of its arrays have the same path;
        `TypeError` if one of them is not on devices, such as an array of NumPy.
        """
        check_state_not_donated(state)
        step = step_of(state)
        self._last_save = time.monotonic()
        leaves, _ = partition_by_path(state)
        described = describe(step, leaves, loader, metrics, callbacks, self._renamed)
        self._writer.start(leaves, trained_paths(state), described)

    def close(self) -> None:
        """Wait for the last save, whether or not it succeeds, and end the last claim."""
        self._writer.close()
        self._folder.lock.claims = max(0, self._folder.lock.claims - 1)
        self._folder.lock.release()

    def wait(self) -> None:
        """Wait until everything is written.

        **Raises:**

        `OSError` if the last save failed.
        """
        self._writer.wait()
        self._folder.lock.release()

    def _outdated(self, newest: int) -> set[int]:
        # Listed once: what is not seen now, and may be the best, must not be removed.
        steps = self._folder.own_steps()
        good = [step for step in steps if step not in self._folder.damaged]
        best = best_of(self._values(good), self._mode)
        kept = {newest, *good[-self._max_to_keep :], best}
        return {step for step in steps if step not in kept}

    def _values(self, steps: Iterable[int]) -> dict[int, float]:
        """The values of `best` by step, of the checkpoints that have one."""
        values: dict[int, float] = {}
        for step in steps if self._best is not None else ():
            # A checkpoint may be damaged, or have just been removed.
            with contextlib.suppress(ValueError, FileNotFoundError):
                metrics = self._folder.description(step)["metrics"]
                if self._best in metrics:
                    values[step] = metrics[self._best]
        return values


class _Found(NamedTuple):
    """The arrays, by path, that were read from a checkpoint for a PyTree."""

    where: str  #: The name of the checkpoint in messages.
    wanted: dict[str, Any]
    static: Static
    arrays: dict[str, Array]
    changed: Changed
    renamed: list[Mapping[str, str | None]]  #: The renames of the run so far.


def _log(where: str, changed: Changed) -> None:
    if any(changed) and is_main_process():
        _LOG.warning("%s was restored with changes: %s.", where, changed)
