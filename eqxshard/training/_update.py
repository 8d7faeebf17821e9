"""One update of a state: the pure function that a train step compiles."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ..sharding._placement import filter_shard
from ..transforms._dtypes import at_least_float32
from ..transforms._partition import Static
from ._config import StepConfig, takes_value
from ._gradients import Gradients, compute_gradients
from ._guard import gradients_fit, guard_update
from ._layout import StateLayout, constrain_state, fetch_offloaded
from ._metrics import Metrics
from ._optimizer import check_update
from ._signature import Signature
from ._state import TrainState, flatten_state, split_model


def train_step(
    config: StepConfig,
    layout: StateLayout,
    static: Static,
    signature: Signature | None,
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
    state = TrainState(*static.combine(arrays))
    extra = (), ()
    if signature is not None:
        extra = (signature.static.combine(kept),), (signature.storage(),)
    gradients = compute_gradients(config, layout, state, batch, extra)
    params, frozen = split_model(state.model, config.trainable)
    before = filter_shard(params, layout.update), fetch_offloaded(state, layout.rule)

    def update() -> PyTree:
        return *_apply(config.optim, gradients, *before), gradients.model_state

    nonfinite, loss_scale = jnp.zeros((), jnp.int32), state.loss_scale
    if config.nonfinite == "ignore":
        new = update()
    else:
        new, finite = guard_update(update, (*before, state.model_state), gradients, layout)
        nonfinite = 1 - finite.astype(jnp.int32)
        if loss_scale is not None:
            # Another scale helps against gradients that do not fit, not against updates.
            fits = gradients_fit(gradients, layout)
            loss_scale = loss_scale.after(fits, config.precision)
    params, opt_state, model_state = new
    state = TrainState(
        step=state.step + 1,
        model=eqx.combine(params, frozen),
        opt_state=opt_state,
        key=state.key,
        model_state=model_state,
        loss_scale=loss_scale,
        made_with=state.made_with,
    )
    arrays, _ = flatten_state(constrain_state(state, layout))
    sums = gradients.sums
    if config.grad_norms:
        norm = optax.tree.norm(jax.tree.map(at_least_float32, gradients.grads))
        sums = {**sums, "grad_norm": norm * gradients.weight}
    return arrays, Metrics(sums, gradients.weight, nonfinite)


def _apply(
    optim: optax.GradientTransformationExtraArgs,
    gradients: Gradients,
    params: PyTree,
    opt_state: PyTree,
) -> tuple[PyTree, PyTree]:
    """The parameters and the optimizer's state after an update."""
    # Some optimizers use the value of the loss, too; a few cannot be given it.
    value: dict[str, Any] = {"value": gradients.loss} if takes_value(optim) else {}
    try:
        updates, new = optim.update(gradients.grads, opt_state, params, **value)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"the optimizer needs more than gradients and the value of the loss ({error}); "
            "use one without a line search, such as optax.lbfgs(linesearch=None)."
        ) from error
    # Unlike Equinox's, optax's own keeps the parameters' types.
    return optax.apply_updates(params, updates), check_update(new, opt_state)
