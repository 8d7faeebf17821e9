"""The state that a run goes on from."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import Array, Key

from ..checkpoint._changes import Changes
from ..checkpoint._checkpointer import Checkpointer
from ..training._init import abstract_state, complete_state
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
