"""Callbacks that add values to reports."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from ..sharding._leaves import leaf_path
from ..sharding._peaks import mfu
from ..training._ema import ema_model, has_average
from ..training._states import map_models, states_of
from ._callbacks import Callback
from ._loop import Loop


class EvaluateEMA(Callback):
    """Evaluate the averaged weights, too, after each evaluation.

    The results are reported as `ema/...`, beside `eval/...`.

    **Arguments:**

    - `evaluate`: called as `fit`'s own is, with [`eqxshard.ema_model`][] of the state, or
        of each state that has an average; others give their weights.

    !!! Example

        ```python
        state = eqxshard.fit(
            state,
            train_step,
            loader,
            epochs=10,
            evaluate=evaluate,
            callbacks=[eqxshard.callbacks.EvaluateEMA(evaluate)],
        )
        ```
    """

    def __init__(self, evaluate: Callable[[PyTree], Mapping[str, Any]]):
        self._evaluate = evaluate

    def after_evaluation(self, loop: Loop) -> None:
        """Evaluate, and add the values to the report."""
        none_has = not any(map(has_average, states_of(loop.state)))
        models = map_models(
            # If none has an average, this says what to do.
            loop.state,
            lambda s: ema_model(s) if none_has or has_average(s) else s.model,
        )
        loop.evaluate(self._evaluate, models, "ema")


class Throughput(Callback):
    """Report tokens per second, and how much of the devices' peak the model uses.

    Each report gets `tokens_per_second`, of all devices together, and, if the FLOPs of a
    token and the peak of the devices are known, `mfu`, a number between 0 and 1.
    Evaluations and checkpoints do not count as time.

    **Arguments:**

    - `tokens_per_example`: the length of an example; 1 if examples weigh as much as they
        have tokens, as packed documents do.
    - `flops_per_token`: of the model, as [`eqxshard.nn.flops_per_token`][] counts them.
    - `peak`: the operations per second that one device can do; by default, those of
        [`eqxshard.nn.peak_flops`][] in bfloat16.

    **Raises:**

    `ValueError` if one of the numbers is not positive.

    !!! Example

        ```python
        callbacks = [eqxshard.callbacks.Throughput(1_024, flops_per_token=8.6e8)]
        ```
    """

    def __init__(
        self,
        tokens_per_example: int,
        flops_per_token: float | None = None,
        *,
        peak: float | None = None,
    ):
        for value in (tokens_per_example, flops_per_token, peak):
            if value is not None and not value > 0:
                raise ValueError(f"Throughput needs positive numbers, and got {value}.")
        self._tokens_per_example = tokens_per_example
        self._flops_per_token = flops_per_token
        self._peak = peak

    def after_report(self, loop: Loop) -> None:
        """Log both."""
        examples_per_second = loop.values["train/examples_per_second"]
        tokens_per_second = examples_per_second * self._tokens_per_example
        loop.log({"tokens_per_second": tokens_per_second})
        if self._flops_per_token is None:
            return
        devices = states_of(loop.state)[0].step.sharding.device_set
        used = mfu(
            tokens_per_second, self._flops_per_token, peak=self._peak, devices=list(devices)
        )
        if used is not None:
            loop.log({"mfu": used})


class LearningRate(Callback):
    """Report the learning rate, as `learning_rate`.

    It is that of the step before the report. If the state has several (of parameter
    groups, or of several models), each is reported as `learning_rate/` and its name.

    **Arguments:**

    - `schedule`: the optimizer's, a function of the number of steps taken before. Steps
        that were skipped count here, but not in the optimizer. By default, the rate is
        read from the optimizer's state, where `optax.inject_hyperparams` keeps it.

    !!! Example

        ```python
        schedule = optax.cosine_decay_schedule(1e-3, 10_000)
        optim = optax.adamw(schedule)
        ...
        callbacks = [eqxshard.callbacks.LearningRate(schedule)]
        ```
    """

    def __init__(self, schedule: Callable[[int], Any] | None = None):
        self._schedule = schedule

    def after_report(self, loop: Loop) -> None:
        """Log the rate."""
        if self._schedule is not None:
            loop.log({"learning_rate": self._schedule(loop.step - 1)})
            return
        optimizers = jax.tree.map(
            lambda state: state.opt_state,
            loop.state,
            is_leaf=lambda node: hasattr(node, "opt_state"),
        )
        found = optax.tree_utils.tree_get_all_with_path(optimizers, "learning_rate")
        # Not the state of a schedule, which has the same key.
        rates = {_group(path): x for path, x in found if jax.tree_util.all_leaves([x])}
        if not rates:
            raise ValueError(
                "this state does not keep its learning rate; give LearningRate the "
                "schedule, or make the optimizer with optax.inject_hyperparams."
            )
        for group, rate in rates.items():
            name = f"learning_rate/{group}" if len(rates) > 1 else "learning_rate"
            loop.log({name: rate})


def _group(path: tuple[Any, ...]) -> str:
    """The names and positions in a path, without the optimizer's own fields."""
    kinds = jax.tree_util.DictKey | jax.tree_util.SequenceKey
    return leaf_path(tuple(key for key in path[:-1] if isinstance(key, kinds)))
