"""One update of a state: a pure function, which the train step compiles."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from ..sharding._placement import filter_shard
from ._config import ResolvedConfig, takes_value
from ._gradients import Gradients, LossInputs, compute_gradients
from ._guard import Update, all_finite, select_update, written
from ._metrics import Metrics
from ._norms import norms
from ._optimizer import check_update
from ._state import TrainState, split_model


def update_state(
    config: ResolvedConfig, inputs: LossInputs, state: TrainState, batch: PyTree
) -> tuple[TrainState, Metrics]:
    """Take one step.

    **Arguments:**

    - `config`: the loss function, the optimizer and the other settings.
    - `inputs`: the shardings of the state, and the step's `extra`.
    - `state`, `batch`: as for [`eqxshard.TrainStep`][].

    **Returns:**

    The new state, and the metrics of the batch.
    """
    gradients = compute_gradients(config, inputs, state, batch)
    layout = inputs.layout
    params, frozen = split_model(state.model, config.trainable)
    old = filter_shard(params, layout.update), state.opt_state, state.model_state

    def apply() -> tuple[PyTree, PyTree, PyTree]:
        return apply_gradients(config.optim, gradients, *old[:2])

    nonfinite: Int[Array, ""] = jnp.zeros((), jnp.int32)
    loss_scale: Any = state.loss_scale
    if config.nonfinite == "ignore":
        params, opt_state, model_state = apply()
    else:
        update = Update(apply)
        new = update()
        whole = jax.tree.map(lambda _: layout.whole, eqx.filter(old[2], eqx.is_array))
        grads = written(gradients.grads, None, layout.update)
        values = written(new, old, (layout.update, layout.opt_state, whole))
        loss_is_finite = jnp.isfinite(gradients.loss)
        finite = all_finite([*grads, *values], config.mesh) & loss_is_finite
        params, opt_state, model_state = select_update(
            finite, update, new, old, config.mesh
        )
        nonfinite = 1 - finite.astype(jnp.int32)
        if loss_scale is not None:
            # Another scale helps against gradients that do not fit, not against updates.
            fits = all_finite(grads, config.mesh) & loss_is_finite
            loss_scale = loss_scale.after(fits, config.precision)
    state = TrainState(
        step=state.step + 1,
        model=eqx.combine(params, frozen),
        opt_state=opt_state,
        key=state.key,
        model_state=model_state,
        loss_scale=loss_scale,
        made_with=state.made_with,
    )
    sums = dict(gradients.sums)
    for name, norm in norms(gradients.grads, config.grad_norms).items():
        sums[name] = norm * gradients.weight
    return state, Metrics(sums, gradients.weight, nonfinite)


def apply_gradients(
    optim: optax.GradientTransformationExtraArgs,
    gradients: Gradients,
    params: PyTree,
    opt_state: PyTree,
) -> tuple[PyTree, PyTree, PyTree]:
    """The parameters, the optimizer's state and the model's own state after an update."""
    # Some optimizers use the value of the loss, too; a few cannot be given it.
    extra = {"value": gradients.loss} if takes_value(optim) else {}
    try:
        updates, new = optim.update(gradients.grads, opt_state, params, **extra)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            f"the optimizer needs more than gradients and the value of the loss ({error}); "
            "use one without a line search, such as optax.lbfgs(linesearch=None)."
        ) from error
    # Unlike Equinox's, optax's own keeps the parameters' types.
    params = optax.apply_updates(params, updates)
    return params, check_update(new, opt_state), gradients.model_state
