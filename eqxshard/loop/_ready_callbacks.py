"""Callbacks that are ready to use."""

import math
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from .._errors import UsageError
from ..checkpoint._folder import Mode, best_mode
from ..sharding._peaks import mfu
from ..training._ema import ema_model, has_average
from ..training._state import map_models, states_of
from ._callbacks import Callback
from ._loop import Loop


class EarlyStopping(Callback):
    """Stop when a metric has not improved for some evaluations.

    The state is saved before the run ends, if there is a checkpointer. It is the last
    state, not the best one: with `Checkpointer(..., best=metric)`, that is in the
    checkpoint of [`eqxshard.Checkpointer.best_step`][]. The count is saved in every
    checkpoint, so a resumed run stops where the uninterrupted one would have. A run that
    has stopped takes no more steps when it resumes, unless `patience` is larger then.

    **Arguments:**

    - `metric`: its name in reports, such as `"eval/loss"`.
    - `patience`: stop after this many reports of the metric in a row without improvement.
    - `min_delta`: a smaller improvement does not count.
    - `mode`: whether the smallest (`"min"`) or the largest (`"max"`) value is best; by
        default as for [`eqxshard.Checkpointer`][].

    **Raises:**

    `ValueError` if `patience` is less than 1, `min_delta` is negative, or `mode` is unknown
    or missing where the name does not tell; during the run, if an evaluation is reported
    without the metric.

    !!! Example

        ```python
        state = eqxshard.fit(
            state,
            train_step,
            loader,
            epochs=100,
            evaluate=evaluate,
            checkpointer=eqxshard.Checkpointer("run", best="eval/loss"),
            callbacks=[eqxshard.callbacks.EarlyStopping("eval/loss", patience=5)],
        )
        ```
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        *,
        min_delta: float = 0.0,
        mode: Mode | None = None,
    ):
        if patience < 1 or min_delta < 0:
            raise UsageError(
                f"patience={patience}, min_delta={min_delta} are out of range; use a "
                "patience= of at least 1 and a min_delta= of at least 0."
            )
        self.metric = metric
        self._patience = operator.index(patience)
        self._min_delta = min_delta
        self._sign = 1.0 if best_mode(metric, mode) == "max" else -1.0
        self._best: float | None = None
        self._waited = 0

    def after_report(self, loop: Loop) -> None:
        """Compare the metric with its best value."""
        if self.metric not in loop.values:
            if any(name.startswith("eval/") for name in loop.values):
                raise UsageError(
                    f"EarlyStopping waits for {self.metric!r}, which the report of step "
                    f"{loop.step} does not have; use one of {', '.join(loop.values)}."
                )
            return
        value = float(loop.values[self.metric])
        best = self._best
        better = best is None or self._sign * (value - best) > self._min_delta
        # A value that is not finite is never an improvement: nothing improves on a nan.
        if better and math.isfinite(value):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            what = "was not finite" if best is None else f"has not improved on {best}"
            loop.stop(f"{self.metric} {what} in {_reports(self._waited)}")

    def state(self) -> dict[str, Any]:
        """The best value and the number of evaluations since."""
        return {"best": self._best, "waited": self._waited}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue to count."""
        self._best, self._waited = state["best"], state["waited"]

    def ended(self, state: Mapping[str, Any]) -> str | None:
        """Why the run has ended, unless `patience` is larger now."""
        if state["waited"] < self._patience:
            return None
        best = state["best"]
        what = "was not finite" if best is None else f"had not improved on {best}"
        return (
            f"{self.metric} {what} in {_reports(state['waited'])} (with a larger patience= "
            "it would go on)"
        )


def _reports(count: int) -> str:
    return f"{count} report{'s' * (count > 1)}"


class TimeLimit(Callback):
    """Stop after some wall time, at the next report.

    The time counts from when the callback is made, so a script that makes it first stays
    within the limit of its job. The state is saved, if there is a checkpointer: leave time
    for that.

    **Arguments:**

    - `limit`: seconds, or text such as `"1:30:00"`: hours, minutes and seconds.

    **Raises:**

    `ValueError` if the limit is not positive, or is text of another form.

    !!! Example

        ```python
        callbacks = [eqxshard.callbacks.TimeLimit("23:45:00")]
        ```
    """

    def __init__(self, limit: float | str):
        try:
            parts = [float(part) for part in str(limit).split(":")]
        except ValueError:
            parts = [math.nan]
        seconds = sum(part * 60**i for i, part in enumerate(reversed(parts)))
        if not seconds > 0:
            raise UsageError(
                f"{limit!r} is not a time limit; give a positive number of seconds, or "
                "hours, minutes and seconds such as '1:30:00'."
            )
        self._limit = limit
        self._end = time.monotonic() + seconds

    def after_report(self, loop: Loop) -> None:
        """Look at the clock."""
        if time.monotonic() >= self._end:
            loop.stop(f"the time limit of {self._limit} is reached")


class EvaluateEMA(Callback):
    """Evaluate the averaged weights, too, after each evaluation.

    The results are reported as `ema/...`, beside `eval/...`. A model with state, such as
    that of `equinox.nn.BatchNorm`, is evaluated with the state of the weights that are
    trained; [`eqxshard.ema_model`][] shows how to compute that of the average.

    **Arguments:**

    - `evaluate`: a function as for [`eqxshard.fit`][], called with
        [`eqxshard.ema_model`][] of the state; of several states, those without an average
        give the weights that are trained. By default, the `evaluate` of the run.

    !!! Example

        ```python
        state = eqxshard.fit(
            state,
            train_step,
            loader,
            epochs=10,
            evaluate=evaluate,
            callbacks=[eqxshard.callbacks.EvaluateEMA()],
        )
        ```
    """

    def __init__(self, evaluate: Callable[[PyTree], Mapping[str, Any]] | None = None):
        self.evaluate = evaluate

    def after_evaluation(self, loop: Loop) -> None:
        """Evaluate, and add the values to the report."""
        none_has = not any(map(has_average, states_of(loop.state)))
        models = map_models(
            loop.state,
            # If no state has an average, the error of `ema_model` says what to do.
            lambda s: ema_model(s) if none_has or has_average(s) else s.model,
        )
        evaluate = self.evaluate or loop.evaluation
        assert evaluate is not None  # There was an evaluation.
        loop.evaluate(evaluate, models, "ema")


def check_evaluated(callbacks: Sequence[Callback], evaluate: Any) -> None:
    """Refuse `EvaluateEMA` in a run without evaluations."""
    if evaluate is None and any(isinstance(each, EvaluateEMA) for each in callbacks):
        raise UsageError(
            "EvaluateEMA evaluates after each evaluation of the run, which has none; give "
            "fit evaluate=, or give train a metric_fn and eval_data."
        )


class Every(Callback):
    """Call a function at intervals of steps, for example to draw samples.

    **Arguments:**

    - `steps`: the number of steps between calls.
    - `function`: called with the [`eqxshard.callbacks.Loop`][].

    !!! Example

        ```python
        def draw(loop):
            image = sample(loop.state.model, jax.random.key(0))
            plt.imsave(f"samples/{loop.step}.png", image)


        callbacks = [eqxshard.callbacks.Every(1_000, draw)]
        ```
    """

    def __init__(self, steps: int, function: Callable[[Loop], object]):
        self.every = operator.index(steps)
        self._function = function

    def after_step(self, loop: Loop) -> None:
        """Call the function."""
        self._function(loop)


class LearningRate(Callback):
    """Report the learning rate of the step before each report, as `learning_rate`.

    Where the rate is part of the optimizer's state, by `optax.inject_hyperparams`, a
    callback of your own logs `optax.tree_utils.tree_get(loop.state.opt_state,
    "learning_rate")`.

    **Arguments:**

    - `schedule`: the schedule of the optimizer, a function of the number of steps taken
        before. Steps that were skipped count here, but not in the optimizer.

    !!! Example

        ```python
        schedule = optax.cosine_decay_schedule(1e-3, 10_000)
        optim = optax.adamw(schedule)
        ...
        callbacks = [eqxshard.callbacks.LearningRate(schedule)]
        ```
    """

    def __init__(self, schedule: Callable[[int], Any]):
        self._schedule = schedule

    def after_report(self, loop: Loop) -> None:
        """Log the rate."""
        loop.log({"learning_rate": self._schedule(loop.step - 1)})


class Profile(Callback):
    """Record a profile of some steps with `jax.profiler`, to look at in TensorBoard.

    The run waits for the steps before, and for those of the profile, so that it shows whole
    steps. With several processes, each writes its own profile.

    **Arguments:**

    - `first`, `last`: the numbers of the first and the last step to record. The run's first
        step, which compiles, is 1, so `first` is at least 2. A run that starts between
        them records nothing; one that ends between them, a shorter profile.
    - `directory`: the folder to write to.

    **Raises:**

    `ValueError` unless `2 <= first <= last`.

    !!! Example

        ```python
        callbacks = [eqxshard.callbacks.Profile(100, 104, "runs/profile")]
        ```
    """

    def __init__(self, first: int, last: int, directory: str | os.PathLike[str]):
        if not 2 <= first <= last:
            raise UsageError(
                f"steps {first}:{last} cannot be profiled; use 2 <= first <= last."
            )
        self._first, self._last = operator.index(first), operator.index(last)
        self._directory = os.fspath(directory)
        self._recording = False

    def next_step(self, step: int) -> int | None:
        """The step before the first one, and the last one."""
        return next((s for s in (self._first - 1, self._last) if s > step), None)

    def after_step(self, loop: Loop) -> None:
        """Start or end the recording."""
        jax.block_until_ready(loop.state)
        self.close()
        if loop.step == self._first - 1:
            jax.profiler.start_trace(self._directory)
            self._recording = True

    def close(self) -> None:
        """End the recording, if the run ends before the last step."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()


class Throughput(Callback):
    """Report tokens per second, and how much of the devices' peak the model uses.

    Each report gets `tokens_per_second`, of all devices together, and, if the FLOPs of a
    token and the peak of the devices are known, `mfu`, a number between 0 and 1.
    Evaluations and checkpoints do not count as time.

    **Arguments:**

    - `tokens_per_example`: the length of an example; 1 if examples weigh as much as they
        have tokens, as packed documents do.
    - `flops_per_token`: the floating-point operations of training on a token, as
        [`eqxshard.nn.flops_per_token`][] counts them.
    - `peak`: the operations per second that one device can do; by default, those of
        [`eqxshard.nn.peak_flops`][] in bfloat16, also where products are of float8.

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
        self._tokens_per_example = tokens_per_example
        self._flops_per_token = flops_per_token
        self._peak = peak

    def after_report(self, loop: Loop) -> None:
        """Log the tokens per second and the MFU."""
        tokens = loop.values["train/examples_per_second"] * self._tokens_per_example
        loop.log({"tokens_per_second": tokens})
        if self._flops_per_token is None:
            return
        devices = list(states_of(loop.state)[0].step.sharding.device_set)
        used = mfu(tokens, self._flops_per_token, peak=self._peak, devices=devices)
        if used is not None:
            loop.log({"mfu": used})
