"""Calling the user's code with a model and a batch as it gets them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..sharding._explicit import replicated_on, to_auto, to_explicit
from ..sharding._mesh import batch_sharding
from ._advice import add_advice
from ._gather import gather_all, gather_in_loops, has_split
from ._precision import Precision
from ._state import state_indices


def call_as_used(
    fn: Callable[..., Any],
    given: Mapping[str, PyTree],
    storage: Mapping[str, PyTree[NamedSharding | None]],
    update: Mapping[str, PyTree[NamedSharding | None]],
    batch: PyTree,
    others: tuple[PyTree, ...],
    mesh: Mesh,
    precision: Precision | None,
) -> Any:
    """Call `fn(given, batch, *others)`, all cast, gathered and on the mesh of a step.

    **Arguments:**

    - `fn`: a function that calls the user's code.
    - `given`: a dict of which the entry `model` is the model, as `storage` and `update`
        are, which have the shardings of its arrays and of their gradients.
    - `batch`: a batch.
    - `others`: more arguments, which are the same on all devices.
    - `mesh`, `precision`: of the step.

    **Returns:**

    What the function returns.
    """
    if precision is not None:
        batch = precision.cast(batch, "batch")
    used, stored = gather_all(given, storage, update, mesh, precision)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        rows = batch_sharding(mesh)
        typed = jax.tree.map(lambda x: to_explicit(x, rows), batch)
        args = used, typed, *replicated_on(others, mesh)
        try:
            if not has_split(stored):
                return to_auto(fn(*args))
            return to_auto(gather_in_loops(fn, args, stored))
        except Exception as error:
            add_advice(error, typed, stateful=bool(state_indices(given["model"])))
            raise
