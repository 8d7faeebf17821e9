"""`restore_model`: the model of a run, for scripts that use it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..checkpoint._checkpointer import Checkpointer
from ..sharding._leaf_rules import replicate
from ..sharding._rule import Rule
from ..sharding._text import comma_list, did_you_mean
from ..training._init import abstract_state, init_state
from ._config import RunConfig
from ._folder import RunFolder, default_folder, read_values


def restore_model(
    make_model: Callable[[Any], PyTree],
    *,
    config: RunConfig | None = None,
    name: str | None = None,
    mesh: str | Mesh = "data=-1",
    rule: Rule | None = None,
    best: str | None = None,
    mode: Literal["max", "min"] = "max",
    step: int | Literal["newest"] | None = None,
    load: Callable[[Any], PyTree] | None = None,
    rename: Mapping[str, str | None] = {},
) -> PyTree:
    """Read the model of a run of [`eqxshard.train`][], to use it or to evaluate it.

    Each array is read straight into its sharding. The mesh and the rule may be others
    than those that trained.

    **Arguments:**

    - `make_model`: as for [`eqxshard.init_state`][]; the model without state that the run
        trained. It may choose other dtypes.
    - `config`: the user's options; its `output` is the run's folder.
    - `name`: the name of the run, for its default folder, as for [`eqxshard.train`][].
    - `mesh`, `rule`: as for [`eqxshard.train`][].
    - `best`, `mode`: read the best checkpoint by this metric, such as `"eval/loss"`.
    - `step`: read the checkpoint of this step, or the `"newest"`. A run that was trained
        without `best=` needs neither: the newest is read.
    - `load`: as for [`eqxshard.init_state`][]: a model without a run, of which only the
        weights are loaded. It is used unless `config.resume` asks for the run:
        `"auto"` reads the run if it has a checkpoint.
    - `rename`: as for [`eqxshard.Checkpointer.restore`][].

    **Returns:**

    The model.

    **Raises:**

    `FileNotFoundError` if the run has no checkpoint. `ValueError` if none has a value of
    `best`, the run kept a best checkpoint by the other `mode`, or neither `best` nor
    `step` says which one to read, the model is not the one that was trained, or has a
    state, and as [`eqxshard.train`][] does for devices.

    !!! Example

        ```python
        model = eqxshard.run.restore_model(
            make_model,
            config=eqxshard.RunConfig(output="runs/gpt"),
            best="eval/loss",
            mode="min",
        )
        ```
    """
    config = RunConfig() if config is None else config
    config.check()
    # Before the first array, because it may simulate devices.
    mesh = config.make_mesh(mesh)
    key = jax.random.key(config.seed)
    options: Any = {"key": key, "mesh": mesh, "rule": rule or replicate()}
    folder = RunFolder(config.output or default_folder(name))
    checkpointer = Checkpointer(folder.checkpoints, best=best, mode=mode)
    resumes = {"no": False, "yes": True, "auto": bool(checkpointer.steps())}
    if load is not None and not resumes[config.resume]:
        return init_state(make_model, optax.identity(), **options, load=load).model
    like = abstract_state(make_model, optax.identity(), **options)
    if like.model_state is not None:
        raise ValueError(
            "restore_model reads models without state; read this one with "
            "Checkpointer.restore."
        )
    if step is None:
        step = _choose(folder, checkpointer, best, mode)
    return checkpointer.restore_model(like.model, step=step, rename=rename)


def _choose(
    folder: RunFolder, checkpointer: Checkpointer, best: str | None, mode: str
) -> int | Literal["newest"]:
    """The best checkpoint; the newest if nothing is best."""
    record = read_values(folder.record)
    kept, kept_mode = record.get("best"), record.get("mode", mode)
    is_unclear = best is None or (best == kept and mode != kept_mode)
    if kept is not None and is_unclear:
        raise ValueError(
            f"the run in {folder.path} kept the {kept_mode} of {kept}; give best={kept!r} "
            f"with mode={kept_mode!r}, or step= the one to read."
        )
    step = checkpointer.best_step()
    if best is not None and step is None and checkpointer.steps():
        steps = checkpointer.steps()
        known = {name for at in steps for name in checkpointer.description(at)["metrics"]}
        known = sorted(name for name in known if name.startswith("eval/"))
        hint = f"they have {comma_list(known)}; " if known else ""
        hint = did_you_mean(best, known) or hint
        raise ValueError(
            f"no checkpoint in {folder.checkpoints} has a value of {best}; {hint}use "
            "another metric, or step='newest'."
        )
    return "newest" if step is None else step
