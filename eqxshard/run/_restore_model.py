"""`restore_model`: the model of a run, for scripts that use it."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._folder import Mode
from ..sharding._leaf_rules import replicate
from ..sharding._rule import Rule
from ..sharding._text import comma_list, did_you_mean
from ..training._init import abstract_state, init_state
from ..training._state import with_state
from ._config import RunConfig
from ._paths import RunPaths, default_folder, read_values


def restore_model(
    make_model: Callable[[Any], PyTree],
    folder: str | os.PathLike[str] | None = None,
    *,
    config: RunConfig | None = None,
    name: str | None = None,
    mesh: str | Mesh = "data=-1",
    rule: Rule | None = None,
    best: str | None = None,
    mode: Mode | None = None,
    step: int | Literal["newest"] | None = None,
    load: Callable[[Any], PyTree] | None = None,
    rename: Mapping[str, str | None] = {},
) -> PyTree:
    """Read the model of a run of [`eqxshard.train`][], to use it or to evaluate it.

    Each array is read straight into its sharding. The mesh and the rule may be others
    than those that trained.

    **Arguments:**

    - `make_model`: as for [`eqxshard.init_state`][]; the model that the run trained. It may
        choose other dtypes.
    - `folder`: the run's folder; by default, the `output` of `config`.
    - `config`: the user's options.
    - `name`: the name of the run, for its default folder, as for [`eqxshard.train`][].
    - `mesh`, `rule`: as for [`eqxshard.train`][].
    - `best`, `mode`: read the best checkpoint by this metric, such as `"eval/loss"`; by
        default, `mode` is the run's, if it kept the best by this metric, or else as for
        [`eqxshard.Checkpointer`][].
    - `step`: read the checkpoint of this step, or the `"newest"`. A run that was trained
        without `best=` needs neither: the newest is read.
    - `load`: as for [`eqxshard.init_state`][]: a model without a run, of which only the
        weights are loaded. It is used unless `config.resume` asks for the run:
        `"auto"` reads the run if it has a checkpoint.
    - `rename`: as for [`eqxshard.Checkpointer.restore`][].

    **Returns:**

    The model; of one that has a state, such as `BatchNorm`, the pair
    `(model, model_state)`.

    **Raises:**

    `FileNotFoundError` if the run has no checkpoint. `ValueError` if no checkpoint has a
    value of `best`, if the run kept the best one and `best`, `mode` and `step` do not say
    which one to read, if the model is not the one that was trained, if `folder` and
    `config` both name a folder, and as [`eqxshard.train`][] does for devices.

    !!! Example

        ```python
        model = eqxshard.run.restore_model(make_model, "runs/gpt", best="eval/loss")
        ```
    """
    config = RunConfig() if config is None else config
    config.check()
    if folder is not None and config.output is not None:
        raise UsageError(
            f"restore_model was given two folders, {os.fspath(folder)!r} and that of "
            f"config, {config.output!r}; give one."
        )
    # Before the first array, because it may simulate devices.
    mesh = config.make_mesh(mesh)
    key = jax.random.key(config.seed)
    options: Any = {"key": key, "mesh": mesh, "rule": rule or replicate()}
    run = RunPaths(folder or config.output or default_folder(name))
    record = read_values(run.record)
    if best is not None and mode is None and best == record.get("best"):
        mode = record.get("mode")
    checkpointer = Checkpointer(run.checkpoints, best=best, mode=mode)
    resumes = {"no": False, "yes": True, "auto": bool(checkpointer.steps())}
    if load is not None and not resumes[config.resume]:
        made = init_state(make_model, optax.identity(), **options, load=load)
        return with_state(made.model, made.model_state)
    like = abstract_state(make_model, optax.identity(), **options)
    if step is None:
        step = _choose(run, record, checkpointer, best, mode)
    model = with_state(like.model, like.model_state)
    return checkpointer.restore_model(model, step=step, rename=rename)


def _choose(
    run: RunPaths,
    record: Mapping[str, Any],
    checkpointer: Checkpointer,
    best: str | None,
    mode: Mode | None,
) -> int | Literal["newest"]:
    """The step of the best checkpoint; `"newest"` for a run that keeps no best one."""
    kept, kept_mode = record.get("best"), record.get("mode")
    is_unclear = best is None or (best == kept and mode != kept_mode)
    if kept is not None and is_unclear:
        raise UsageError(
            f"the run in {run.path} kept the checkpoint with the {kept_mode} of {kept}; "
            f"give best={kept!r} with mode={kept_mode!r}, or step= the one to read."
        )
    step = checkpointer.best_step()
    if best is not None and step is None and checkpointer.steps():
        steps = checkpointer.steps()
        known = {name for at in steps for name in checkpointer.description(at)["metrics"]}
        known = sorted(name for name in known if name.startswith("eval/"))
        hint = f"they have {comma_list(known)}; " if known else ""
        hint = did_you_mean(best, known) or hint
        raise UsageError(
            f"no checkpoint in {run.checkpoints} has a value of {best}; {hint}use "
            "another metric, or step='newest'."
        )
    return "newest" if step is None else step
