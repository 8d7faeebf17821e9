"""The state that a run starts from: a new one, or that of its newest checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._match import Changes
from ..data._loader import Loader
from ..data._order import Steps
from ..loop._callbacks import Callback, why_ended
from ..loop._clock import announced
from ..training._init import abstract_state, complete_state, init_state
from ..training._state import step_of
from ._config import RunConfig
from ._parts import Training


@dataclass(frozen=True)
class Start:
    """Where a run starts, and how far it goes.

    - `state`: the state, or states by name.
    - `step`: the number of steps that the state has taken.
    - `last`: the step to end at.
    - `training`: what is trained, with the optimizers of a run of `last` steps.
    - `ended`: why a callback ended the run before; `None` if none did.
    """

    state: Any
    step: int
    last: int
    training: Training
    ended: str | None = None

    @property
    def goes_on(self) -> bool:
        """True if there are steps left to take."""
        return self.step < self.last and self.ended is None


@dataclass(frozen=True)
class Saved:
    """The checkpoints that a run resumes from, and how the run may differ from them.

    - `checkpointer`: reads the checkpoints.
    - `changes`: which arrays of a checkpoint are renamed or may be dropped, and whether
        arrays that it lacks are made anew.
    - `callbacks`: the callbacks of the run, whose states are in the checkpoints, too.
    """

    checkpointer: Checkpointer
    changes: Changes
    callbacks: Sequence[Callback]


def start_anew(
    training: Training,
    last: int,
    config: RunConfig,
    mesh: Mesh,
    load: Callable[[Any], PyTree] | None,
) -> Start:
    """The start of a run of some steps; `load` is as for [`eqxshard.init_state`][]."""
    training, key = training.for_steps(last), jax.random.key(config.seed)
    with announced("making the state"):
        state = training.make_states(partial(init_state, load=load), key, mesh)
    return Start(state, step_of(state), last, training)


def resume(
    saved: Saved,
    training: Training,
    loader: Loader,
    find_last: Callable[[Steps | None], int],
    config: RunConfig,
    mesh: Mesh,
) -> Start:
    """Start from the newest checkpoint, and move the loader to where it was.

    **Arguments:**

    - `saved`: the checkpoints.
    - `training`: what is trained.
    - `loader`: the loader of the training data.
    - `find_last`: the step to end at, given the epoch of each step.
    - `config`: the user's options.
    - `mesh`: the mesh, which may differ from that of the checkpoint.

    **Raises:**

    `ValueError` as `_restore_position` and [`eqxshard.Checkpointer.restore`][] do.
    """
    key = jax.random.key(config.seed)
    timed = training.for_steps(find_last(loader.steps))

    def make(known: Mapping[str, Array]) -> Any:
        return timed.make_states(complete_state, key, mesh, known=known)

    with announced("reading the checkpoint"):
        like = timed.make_states(abstract_state, key, mesh)
        state = saved.checkpointer.restore_or_make(like, saved.changes, make)
    step = step_of(state)
    description = saved.checkpointer.description(step)
    if description["loader"]:
        _restore_position(loader, description["loader"], config)
    # Epochs that began with another batch size have other numbers of steps.
    last = find_last(loader.steps)
    ended = why_ended(saved.callbacks, description["callbacks"])
    return Start(state, step, last, training.for_steps(last), ended)


def _restore_position(
    loader: Loader, position: Mapping[str, Any], config: RunConfig
) -> None:
    """Move the loader to the position of a checkpoint.

    A run may read its examples in batches of another size, and prints that this changed.

    **Raises:**

    `ValueError` if `--seed` is not the one that ordered the examples, or a dataset that
    makes its own batches made them of another size; and as [`eqxshard.Loader.restore`][]
    does.
    """
    saved = position.get("fingerprint")
    seed = saved.get("seed", config.seed) if isinstance(saved, Mapping) else config.seed
    if seed != config.seed:
        raise UsageError(
            f"--seed is {config.seed}, and the run in this folder has --seed {seed}, which "
            f"orders its examples; resume with --seed {seed}, or start a new run in "
            "another folder."
        )
    loader.restore(position)
    rows = position.get("rows", config.batch_size)
    if rows != config.batch_size:
        raise UsageError(
            f"--batch-size is {config.batch_size}, and the run in this folder has batches "
            f"of {rows}, which its dataset makes; resume with --batch-size {rows}, or "
            "start a new run with a grain.MapDataset of examples, where it can change."
        )
