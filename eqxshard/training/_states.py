"""What one run trains: a state, or a PyTree of several, such as those of a GAN."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from ..sharding._leaves import array_leaves, leaf_path
from ._donation import check_state_not_donated
from ._state import TrainState, split_model, with_state


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def step_of(states: PyTree[Any]) -> int:
    """The number of steps taken; waits for the last one.

    **Raises:**

    `TypeError` if there is no state; `ValueError` if one was donated, or naming those that
    took other numbers of steps than the first.
    """
    found = jax.tree_util.tree_leaves_with_path(states, is_leaf=_is_state)
    others = [leaf for _, leaf in found if not _is_state(leaf)]
    if others or not found:
        raise TypeError(
            f"a {type(others[0] if others else states).__name__} is not a TrainState; make "
            "one with init_state."
        )
    check_state_not_donated([state.step for _, state in found])
    steps = {leaf_path(path): int(state.step) for path, state in found}
    if len(set(steps.values())) > 1:
        says = ", ".join(f"{path} is at step {step}" for path, step in steps.items())
        raise ValueError(
            f"the states of a run must have taken the same number of steps, but {says}; "
            "let each of them take one step for each batch."
        )
    return next(iter(steps.values()))


def states_of(states: PyTree[Any]) -> list[TrainState]:
    """All states of a run."""
    return jax.tree.leaves(states, is_leaf=_is_state)


def trained_paths(states: PyTree[Any]) -> set[str]:
    """The paths of the arrays that training changes, as far as the states know."""
    paths: set[str] = set()
    found = jax.tree_util.tree_leaves_with_path(states, is_leaf=_is_state)
    for path, state in found:
        trained: PyTree[bool] = True
        if state.made_with is not None:
            # A model that was exchanged has its trained arrays elsewhere.
            known = state.made_with.fits(state.model)
            trained = state.made_with.trainable(state.model) if known else False
        params, _ = split_model(state.model, trained)
        root = leaf_path((*path, jax.tree_util.GetAttrKey("model")))
        paths.update(path for path, _ in array_leaves(params, root))
    return paths


def map_models(
    states: PyTree[Any], model_of: Callable[[TrainState], PyTree] = lambda s: s.model
) -> PyTree[Any]:
    """The model of each state, as user code gets it: paired with its state, if any."""
    return jax.tree.map(
        lambda state: with_state(model_of(state), state.model_state),
        states,
        is_leaf=_is_state,
    )
