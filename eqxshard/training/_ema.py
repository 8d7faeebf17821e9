"""An average of the weights over steps, to evaluate and to keep."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree

from .._errors import UsageError
from .._jax import Tracer
from ..transforms._dtypes import at_least_float32
from ._donation import check_state_not_donated
from ._state import TrainState


class EmaState(NamedTuple):
    """The average of the weights.

    - `count`: the number of updates in it.
    - `ema`: the averaged weights, in float32 at least, sharded like their updates.
    """

    count: Int[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    ema: PyTree


def ema_weights(decay: float, *, warmup: bool = True) -> optax.GradientTransformation:
    """Keep an exponential moving average of the weights beside them.

    This is an optax transformation. Put it last in a chain, outside `optax.masked` and its
    like, so that it sees the weights as the step will leave them. The average is kept in
    float32 at least, and starts at the initial weights. (Polyak and Juditsky 1992,
    https://doi.org/10.1137/0330046, in the form of Tarvainen and Valpola 2017,
    https://arxiv.org/abs/1703.01780.)

    The initial weights would dominate the average for the first `1 / (1 - decay)` steps.
    With `warmup`, update number `t`, from 0, uses the decay
    `min(decay, (1 + t) / (10 + t))` instead, so that the average follows the weights
    closely at first. (This is the decay of TensorFlow's
    [`ExponentialMovingAverage`](https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage)
    with `num_updates`.)

    **Arguments:**

    - `decay`: the share of the average that is kept in each step, such as 0.999.
    - `warmup`: whether to start with a smaller decay.

    **Returns:**

    An `optax.GradientTransformation` that does not change updates.

    **Raises:**

    `ValueError` unless `decay` is at least 0 and below 1.

    !!! Example

        ```python
        optim = optax.chain(optax.adamw(1e-3), eqxshard.ema_weights(0.999))
        ...
        averaged = eqxshard.ema_model(state)
        ```
    """
    if not 0 <= decay < 1:
        raise UsageError(
            f"decay={decay} must be at least 0 and below 1; use one such as 0.999."
        )

    def init(params: Any) -> EmaState:
        return EmaState(jnp.zeros((), jnp.int32), jax.tree.map(at_least_float32, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, EmaState]:
        new = optax.apply_updates(params, updates)
        share = jnp.float32(1 - decay)
        if warmup:
            share = jnp.maximum(share, 9 / (10 + state.count.astype(jnp.float32)))

        def average(ema: Array, new: Array) -> Array:
            # In lower precision, the change of one step would be lost to rounding.
            return ema + share.astype(ema.dtype) * (at_least_float32(new) - ema)

        ema = jax.tree.map(average, state.ema, new)
        return updates, EmaState(state.count + 1, ema)

    return optax.GradientTransformation(init, update)


def has_average(state: TrainState) -> bool:
    """True if the optimizer of a state averages the weights."""
    return bool(_averages(state))


def _averages(state: TrainState) -> list[EmaState]:
    is_ema = lambda node: isinstance(node, EmaState)  # noqa: E731
    return [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_ema) if is_ema(x)]


def _place(array: Array, sharding: NamedSharding) -> Array:
    return array if array.sharding == sharding else jax.device_put(array, sharding)


def ema_model(state: TrainState) -> PyTree:
    """The model with the averaged weights that [`eqxshard.ema_weights`][] keeps.

    **Arguments:**

    - `state`: made with an optimizer that includes `ema_weights`.

    **Returns:**

    A model like `state.model`, its arrays in the same places, with everything that is not
    trained unchanged. It is valid as long as the state is: until that is donated to the
    next step. Give it to an eval step; `fit` itself evaluates the weights.

    The averages that `equinox.nn.BatchNorm` keeps of its inputs are not weights:
    `state.model_state` has those of the model that is trained. Compute them again for the
    averaged weights before you evaluate these:

    ```python
    @eqx.filter_jit
    def observe(model, model_state, x):
        apply = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return apply(x, model_state)[1]


    averaged, model_state = eqxshard.ema_model(state), state.model_state
    for batch in itertools.islice(train_loader, 100):
        model_state = observe(averaged, model_state, batch["x"])
    metrics = eval_step((averaged, model_state), test_batch)
    ```

    **Raises:**

    `ValueError` if the optimizer does not keep an average of all weights, or the state was
    donated.
    """
    found = _averages(state)
    check_state_not_donated((found, state.model))
    if not found:
        raise UsageError(
            "the optimizer of this state does not average the weights; make it with "
            "optax.chain(..., eqxshard.ema_weights(0.999))."
        )
    ema = found[-1].ema
    is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)  # noqa: E731
    if any(map(is_masked, jax.tree.leaves(ema, is_leaf=is_masked))):
        raise UsageError(
            "the average covers only what an optax.masked lets through; put ema_weights "
            "outside of it, last in the chain."
        )

    def one(ema: Any, leaf: Any) -> Any:
        if ema is None:
            return leaf
        if isinstance(ema, Tracer) or not isinstance(
            getattr(ema, "sharding", None), NamedSharding
        ):
            return ema.astype(leaf.dtype)
        # The average may be in host memory, and split over more axes than the weights.
        on_device = NamedSharding(ema.sharding.mesh, ema.sharding.spec)
        return _place(_place(ema, on_device).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(one, ema, state.model, is_leaf=lambda x: x is None)
