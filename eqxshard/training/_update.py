"""One update of a state: the pure function that a train step compiles."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ..sharding._placement import filter_shard
from ..transforms._dtypes import at_least_float32
from ..transforms._partition import Static
from ._config import StepConfig
from ._gradients import Gradients, compute_gradients
from ._guard import gradients_fit, guard_update
from ._inputs import Signature
from ._layout import StateLayout, constrain_state, fetch_offloaded
from ._metrics import Metrics
from ._optimizer import apply_update
from ._state import flatten_state, replace, split_model, unflatten_state


def train_step(
    config: StepConfig,
    layout: StateLayout,
    static: Static,
    signature: Signature,
    arrays: list[Array],
    kept: list[Array],
    batch: PyTree,
) -> tuple[list[Array], Metrics]:
    """Take one step.

    **Arguments:**

    - `config`: the loss function, the optimizer and the other settings.
    - `layout`: the shardings of the state.
    - `static`, `signature`: of the state and of the step's `extra`: all but their arrays.
    - `arrays`, `kept`, `batch`: the arrays of the state and of the `extra`, and a batch.

    **Returns:**

    The arrays of the new state, and the metrics of the batch.
    """
    state = unflatten_state(arrays, static)
    extra = signature.static.combine(kept), signature.storage()
    gradients = compute_gradients(config, layout, state, batch, *extra)
    params, frozen = split_model(state.model, config.trainable)
    before = filter_shard(params, layout.update), fetch_offloaded(state.opt_state, layout)

    def update() -> PyTree:
        grads, loss = gradients.grads, gradients.loss
        new = apply_update(config.optim, grads, loss, *before, layout)
        return *new, gradients.model_state

    old, check = (*before, state.model_state), config.nonfinite != "ignore"
    new, finite = guard_update(update, old, gradients, layout, check=check)
    params, opt_state, model_state = new
    loss_scale = state.loss_scale
    if loss_scale is not None:
        # Another scale helps against gradients that do not fit, not against updates.
        fits = gradients_fit(gradients, layout)
        loss_scale = _where(gradients, loss_scale.after(fits, config.precision), loss_scale)
    state = replace(
        state,
        step=state.step + 1,
        model=eqx.combine(params, frozen),
        opt_state=opt_state,
        model_state=model_state,
        loss_scale=loss_scale,
    )
    arrays, _ = flatten_state(constrain_state(state, layout))
    sums = gradients.sums
    if config.grad_norms:
        norm = optax.tree.norm(jax.tree.map(at_least_float32, gradients.grads))
        norm *= gradients.weight.astype(norm.dtype)
        norm = _where(gradients, norm, jnp.zeros_like(norm))
        sums = {**sums, "grad_norm": norm}
    nonfinite = 1 - finite.astype(jnp.int32)
    return arrays, Metrics(sums, gradients.weight, nonfinite, gradients.weights)


def _where(gradients: Gradients, new: PyTree, old: PyTree) -> PyTree:
    """The new values, unless the loss of no example counts."""
    is_step = gradients.is_step
    if is_step is None:
        return new
    return jax.tree.map(lambda x, y: jnp.where(is_step, x, y), new, old)
