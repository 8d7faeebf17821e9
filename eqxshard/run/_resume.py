"""The state and the position that a run goes on from."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Key

from .._errors import UsageError
from ..checkpoint._checkpointer import Checkpointer
from ..checkpoint._match import Changes
from ..data._loader import Loader
from ..training._init import abstract_state, complete_state
from ._config import RunConfig
from ._parts import Training


def restore_state(
    checkpointer: Checkpointer,
    training: Training,
    changes: Changes,
    key: Key[Array, ""],
    mesh: Mesh,
) -> Any:
    """Read the newest checkpoint, and make what it lacks and may lack.

    **Arguments:**

    - `changes`: what may differ from the checkpoint.
    - `key`, `mesh`: as for [`eqxshard.init_state`][].

    **Returns:**

    The state, or states by name.
    """

    def make(known: Mapping[str, Array]) -> Any:
        return training.make_states(complete_state, key, mesh, known=known)

    like = training.make_states(abstract_state, key, mesh)
    return checkpointer.restore_or_make(like, changes, make)


def restore_position(
    loader: Loader, position: Mapping[str, Any], config: RunConfig
) -> None:
    """Move the loader to the position of a checkpoint.

    Another batch size of examples is no mistake: the run says that it has changed.

    **Raises:**

    `ValueError` if `--seed` would order the examples otherwise, or a dataset that makes
    batches made others; and as [`eqxshard.Loader.restore`][] does.
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
