"""`Checkpointer`: states on disk, to resume from on any mesh."""

import contextlib
import math
import operator
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import equinox as eqx
from jaxtyping import PyTree

from ..distributed import assert_same_on_all_processes, broadcast_from_first
from ..training._donation import check_state_not_donated
from ..training._state import step_of, trained_paths
from ._arrays import partition_by_path, read
from ._description import check_structure, describe
from ._folder import CheckpointFolder, Step
from ._writer import CheckpointWriter

_T = TypeVar("_T")


class Checkpointer:
    """Saves the states of a run in a folder, and restores them onto any mesh.

    A checkpoint is the folder `directory/STEP`: the state's arrays as
    [Orbax](https://orbax.readthedocs.io) writes them, by path; a readable
    `description.json` (paths, shapes, dtypes, mesh, the loader's position, the metrics);
    and `checksums.txt`, the SHA-256 of every other file, which is written last: a folder
    without it was interrupted, and does not count.

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
    - `best`: the name of a metric that `fit` reports, such as `"eval/accuracy"`: `fit`
        saves whenever it is better than before, and the best checkpoint is kept, too.
    - `mode`: whether the largest (`"max"`) or the smallest (`"min"`) value is best.

    **Raises:**

    `ValueError` if one of the numbers is not positive, or another option is not known.

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
        mode: Literal["max", "min"] = "max",
    ):
        for number in (max_to_keep, save_every, save_every_seconds):
            if number is not None and not number > 0:
                raise ValueError(
                    f"max_to_keep={max_to_keep}, save_every={save_every}, "
                    f"save_every_seconds={save_every_seconds}: {number} is not positive; "
                    "give a larger number, or None for never."
                )
        if mode not in ("max", "min"):
            raise ValueError(f"mode={mode!r} is not a mode; use 'max' or 'min'.")
        self._folder = CheckpointFolder(directory)
        self.directory = self._folder.path  #: The folder, as an `etils.epath.Path`.
        self._max_to_keep = operator.index(max_to_keep)
        #: Save every this many steps, if not `None`.
        self.save_every = save_every and operator.index(save_every)
        self._save_every_seconds = save_every_seconds
        self._best = best
        self._sign = 1 if mode == "max" else -1
        self._last_save = time.monotonic()
        self._writer = CheckpointWriter(self._folder, self._outdated)

    def steps(self) -> list[int]:
        """The steps with complete checkpoints, in order."""
        return self._folder.steps()

    def best_step(self) -> int | None:
        """The step with the best value of `best`; `None` if no checkpoint has a value."""
        return _best_of(self._scores(self._folder.good_steps()))

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether metrics are better, by `best`, than those of every checkpoint.

        [`eqxshard.fit`][] asks after each evaluation, to save.

        **Raises:**

        `ValueError` if they are of an evaluation, which does not have `best`.
        """
        if self._best is None:
            return False
        if self._best not in metrics and any(name.startswith("eval/") for name in metrics):
            raise ValueError(
                f"best={self._best!r} is not a metric of this run; use one of "
                f"{', '.join(metrics)}."
            )
        # It may be a scalar of JAX's.
        score = self._sign * float(metrics.get(self._best, math.nan))
        for _ in range(2):
            best = -math.inf
            # Not only OSError: packages for object stores have errors of their own.
            with contextlib.suppress(Exception):
                scores = self._scores(self._folder.good_steps())
                best = max(scores.values(), default=best)
            # Processes may see a shared folder at different times.
            if not broadcast_from_first(math.isfinite(score) and score > best):
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

    def restore(self, like: _T, *, step: Step = "newest") -> _T:
        """Read a state, each array straight into its sharding.

        Every file is verified first. If the newest checkpoint is damaged, that is logged,
        and the one before it is used.

        **Arguments:**

        - `like`: a state, or a PyTree of several, such as from
            [`eqxshard.abstract_state`][], whose arrays (or `jax.ShapeDtypeStruct`s) give
            dtypes and shardings; the mesh may be another one. Not donated.
        - `step`: the step to read; by default the newest. `None` is an error.

        **Returns:**

        A state like `like`, with the values that were saved.

        **Raises:**

        `FileNotFoundError` if there is no checkpoint, or `step` is `None`. `OSError` if the
        files cannot be read, even after some tries. `ValueError` if all are damaged, or
        `like` does not have the same arrays: it names each that is missing, superfluous or
        of another shape.
        """
        state = self._read(like, step)
        self._last_save = time.monotonic()
        return state

    def restore_model(
        self, model: _T, *, step: Step = "newest", only: PyTree = True, of: str = ""
    ) -> _T:
        """Read the model of a state, or a part of it, for evaluation or fine-tuning.

        **Arguments:**

        - `model`: a model like the one to read, of arrays or of
            `jax.ShapeDtypeStruct`s, which give dtypes and shardings.
        - `step`: the step whose checkpoint to read; the newest by default.
        - `only`: which of the model's arrays to read: a filter spec as for
            `equinox.partition`. The others stay as they are in `model`, and may have
            other shapes than in the checkpoint, such as those of a new last layer.
        - `of`: the path of its state, such as `"generator"`, if several were saved.

        **Returns:**

        A model like `model`, with the values that were saved.

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
        found = self._read(chosen, step, f"{of}.model" if of else "model")
        return eqx.combine(found, rest)

    def _read(self, like: _T, step: Step, root: str = "") -> _T:
        """Read a PyTree: all that was saved, or arrays below a path."""
        if step is None:
            raise FileNotFoundError(
                f"no checkpoint in {self.directory} has a value of best={self._best!r}; "
                "give the checkpointer the name of a metric that was saved, or leave out "
                "step= to read the newest."
            )
        description = self._folder.choose(step)
        found, saved = description["step"], description["leaves"]
        wanted, static = partition_by_path(like, root)
        if root:
            saved = {path: leaf for path, leaf in saved.items() if path in wanted}
        check_structure(wanted, saved, self._folder.name(found))
        return static.combine([*read(self._folder.at(found), wanted).values()])

    def claim_run(self, step: int, loader: Any) -> Mapping[str, Any]:
        """Claim the directory for a run, unless its checkpoints would mix with another's.

        The directory is created, marked as ours, and locked for other programs until
        `close`, or the end of this process. If it has a checkpoint of this step, the loader
        is moved to where it was then. [`eqxshard.fit`][] calls this.

        **Arguments:**

        - `step`: the step that the run starts from.
        - `loader`: its [`eqxshard.Loader`][].

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
        # One of the user's own may have no position.
        if description["loader"] is not None and hasattr(loader, "restore"):
            loader.restore(description["loader"])
        return description["callbacks"]

    def should_save(self, step: int, *, reporting: bool) -> bool:
        """Whether it is time to save.

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
        already. If the last save is still being written, wait for it first. Call `wait`
        before the program ends.

        **Arguments:**

        - `state`: a state, or a PyTree of several at the same step, such as a dict. Not
            donated here; it may be donated as soon as this returns.
        - `loader`: the [`eqxshard.Loader`][], for its position.
        - `metrics`: the metrics of this state, for `best`.
        - `callbacks`: what the run's callbacks need to continue, as JSON values.

        **Raises:**

        `ValueError` if the state was donated.
        """
        check_state_not_donated(state)
        step = step_of(state)
        self._last_save = time.monotonic()
        leaves, _ = partition_by_path(state)
        described = describe(step, leaves, loader, metrics, callbacks)
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
        steps = self._folder.steps()
        good = [step for step in steps if step not in self._folder.damaged]
        kept = {newest, *good[-self._max_to_keep :], _best_of(self._scores(good))}
        return {step for step in steps if step not in kept}

    def _scores(self, steps: Iterable[int]) -> dict[int, float]:
        """By step, the scores of those that have a value of `best`."""
        scores: dict[int, float] = {}
        for step in steps if self._best is not None else ():
            # It is damaged, or has just been removed.
            with contextlib.suppress(ValueError, FileNotFoundError):
                metrics = self._folder.description(step)["metrics"]
                if self._best in metrics:
                    scores[step] = self._sign * metrics[self._best]
        return scores


def _best_of(scores: Mapping[int, float]) -> int | None:
    """The step with the best score; of equals, the latest."""
    return max(scores, key=lambda step: (scores[step], step), default=None)
