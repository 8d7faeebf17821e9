"""The state that a run goes on from, with what its options let change."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Key

from ..checkpoint._changes import Changed, Changes
from ..checkpoint._checkpointer import Checkpointer
from ..training._init import abstract_state, complete_state
from ._config import RunConfig, allowing
from ._parts import Training


def restore_state(
    checkpointer: Checkpointer,
    training: Training,
    config: RunConfig,
    rename: Mapping[str, str | None],
    key: Key[Array, ""],
    mesh: Mesh,
) -> tuple[Any, Changed]:
    """Read the newest checkpoint, and make what it lacks and may lack.

    **Arguments:**

    - `rename`: as for [`eqxshard.Checkpointer.restore`][].
    - `key`, `mesh`: as for [`eqxshard.init_state`][].

    **Returns:**

    The state, or states by name, and what differs from the checkpoint.
    """

    def allowing_too(lacks: set[str], has: set[str]) -> str:
        return allowing(*sorted({*config.changes, *lacks, *has}))

    def make(known: Mapping[str, Array]) -> Any:
        return training.make_states(complete_state, key, mesh, known=known)

    like = training.make_states(abstract_state, key, mesh)
    changes = Changes(rename, config.changes, config.changes, allowing_too)
    return checkpointer.restore_changed(like, changes, make)
