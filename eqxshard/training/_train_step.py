"""The train step: a batch goes in, a new state comes out, in one donated compiled call."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..compiled._findings import Finding, Lint
from ..data._weights import check_weights, fetch_weights
from ..sharding._placement import filter_shard
from ..sharding._rule import Rule
from ..transforms._compiles import CompileLog, function_name
from ..transforms._partition import Static
from ._compile import Program
from ._compiled_step import CompiledStep, check_shardings
from ._config import Nonfinite, StepConfig, check_optim
from ._extra import (
    DONATED,
    Signature,
    any_donated,
    check_not_donated,
    copy_shared,
    copy_taken,
    take_extra,
)
from ._in_flight import InFlight
from ._inputs import ONE_BATCH, StepInput, several_batches
from ._lint import StepLint
from ._metrics import Metrics
from ._precision import Precision
from ._state import TrainState, flatten_state, unflatten_state


def make_train_step(
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    rule: Rule | None = None,
    trainable: PyTree = None,
    accumulate: int = 1,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool | Mapping[str, str] = False,
    max_compiles: int | None = None,
    lint: Lint = "warn",
) -> "TrainStep":
    """Make the compiled step: gradients, optimizer, new state, in one donated call.

    The batch is split over the `data` and `fsdp` axes of the mesh, parameters and
    optimizer state as the rule says. Parameters that the rule splits over an axis of the
    batch are gathered where they are used, and their gradients are reduced back to where
    they are stored.

    Before it is compiled, the step is rewritten where XLA would do badly: convolutions on
    CPUs, gradients of embedding tables, and checks by `equinox.error_if`. Apart from
    rounding, that changes nothing. `EQXSHARD_REWRITE=off` in the environment turns it off;
    a check that fails on several devices then never returns.

    **Arguments:**

    - `loss_fn`: `loss_fn(model, batch, key)` returns `losses` or `(losses, metrics)`.
        `losses` has one entry per example of the batch, or is a scalar, their mean. Each
        entry of the dict `metrics` has one number or array per example, or is a scalar;
        its name is not `loss` or `nonfinite`. The step minimises the mean over examples.
        If the batch is a dict, its entry `"__weight__"` says how much each example
        counts, in the loss and in metrics, and `"__loss_weight__"` how much in the loss
        alone; both need losses per example. Weights are not negative, nor is the sum of
        loss weights. Examples of weight 0 have no loss of their own, but a loss that
        compares examples, such as a contrastive one, still sees them, and has to mask
        them itself. They may contain nan, for which the loss function gets 0; but an
        infinite slope at their finite values, such as that of a root at 0, makes the
        gradient nan, because 0 times infinity is.
        For a model with state, `model` is the pair `(model, state)`, and the new state is
        returned last: `(losses, state)` or `(losses, metrics, state)`. If the step is
        given an `extra`, it is the fourth argument.
    - `optim`: an optax optimizer, the one the state was made with. It gets gradients that
        point uphill, which for complex parameters are the conjugates of `jax.grad`'s.
    - `mesh`, `rule`, `trainable`, `precision`: by default those that
        [`eqxshard.init_state`][] made the state with.
    - `accumulate`: split the batch into this many microbatches and take their gradients
        in turn, to save memory. Of values per example the result is that of the whole
        batch, whatever the weights. Of a scalar it is the mean over microbatches, which a
        warning says: return values per example where some count more, such as in a mean
        over tokens. Each microbatch gets a key of its own, and a model's state passes
        from one to the next.
    - `nonfinite`: what to do if the loss, a gradient, or what the step would write is not
        finite: a parameter, or what the optimizer and the model keep, where it was finite
        before. `"skip"` leaves all of these exactly as they were, counts the step in
        `Metrics.nonfinite` and excludes it from means; `"raise"` waits for every step and
        raises (the state was donated, so continue from what you saved); `"ignore"` does
        not check.
    - `grad_norms`: whether to add a metric `grad_norm`, the norm of all gradients before
        the optimizer sees them. A dict of regular expressions adds one for each group:
        `{"head": r"^head"}` adds `grad_norm/head`, of the parameters in whose path
        `^head` is found.
    - `max_compiles`: how many times the step may compile; one more raises. By default it
        may compile any number of times, and each that is not expected is explained in the
        log, as a warning: which argument changed. (Expected are the first of a single
        step, and the first of `many` for each number of batches.)
    - `lint`: what to do about findings when the step first compiles: `"warn"` (with an
        [`eqxshard.LintWarning`][]), `"error"` (raise before it runs) or `"off"`; or a
        mapping from kinds of findings to one of these, where the other kinds warn.
        [`eqxshard.lint`][] describes them.

    **Returns:**

    An [`eqxshard.TrainStep`][]: `state, metrics = train_step(state, batch)`.

    **Raises:**

    `TypeError` if `optim` is not an optimizer. `ValueError` if `accumulate`, `nonfinite`,
    `max_compiles` or `lint` is invalid, or `nonfinite` does not suit float16, which needs
    `"skip"`.

    !!! Example

        ```python
        def loss_fn(model, batch, key):
            logits = jax.vmap(model)(batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


        train_step = eqxshard.make_train_step(loss_fn, optim)
        for batch in loader:
            state, metrics = train_step(state, batch)
        ```
    """
    check_optim(optim)
    return TrainStep(
        StepConfig(
            loss_fn=loss_fn,
            optim=optax.with_extra_args_support(optim),
            mesh=mesh,
            rule=rule,
            trainable=trainable,
            accumulate=accumulate,
            precision=precision,
            nonfinite=nonfinite,
            grad_norms=grad_norms,
        ),
        CompileLog(max_compiles),
        StepLint(lint),
    )


_DEBUG_NANS = (
    "jax_debug_nans raised this, whatever nonfinite= is. The state was not donated, so go "
    "on from it. To find the cause, turn jax_debug_nans off and replay the crash dump that "
    "eqxshard.fit writes."
)

#: What a compiled step is for: the state's static part, the kind of input, the extra.
_Key = tuple[Static, StepInput, Signature | None]


class TrainStep:
    """What [`eqxshard.make_train_step`][] returns: call it with a state and a batch.

    At most two steps are in flight: a call blocks only until the second-to-last step has
    finished.
    """

    def __init__(self, config: StepConfig, compile_log: CompileLog, lint: StepLint):
        #: The settings of the step.
        self.config = config
        self._compile_log = compile_log
        self._lint = lint
        self._compiled: dict[_Key, CompiledStep] = {}
        #: Those of the former that lint has seen.
        self._ready: dict[_Key, CompiledStep] = {}
        self._in_flight = InFlight()

    def __call__(
        self, state: TrainState, batch: PyTree, extra: PyTree = None
    ) -> tuple[TrainState, Metrics]:
        """Take one step.

        **Arguments:**

        - `state`: donated: use the one that is returned.
        - `batch`: a PyTree of arrays of leading size batch, on the devices or not.
        - `extra`: anything else that the loss function needs, such as a teacher or a
            target network: a PyTree, which is not donated or trained. Its arrays stay in
            their shardings, and are gathered like parameters. Another one of the same
            shapes and shardings compiles nothing.

        **Returns:**

        The new state, and the [`eqxshard.Metrics`][] of this step, without waiting for
        either.

        **Raises:**

        `ValueError` if the batch does not divide over the mesh, or the state was donated
        before, or belongs to another mesh, rule or optimizer, or the step would compile
        more than `max_compiles` times, or lint finds an error (nothing is donated then);
        `FloatingPointError` under `nonfinite="raise"`.
        """
        return self._run(state, batch, ONE_BATCH, extra)

    def many(
        self, state: TrainState, batches: PyTree, extra: PyTree = None
    ) -> tuple[TrainState, Metrics]:
        """Take a step for each of several batches, in one dispatch.

        **Arguments:**

        - `state`: donated.
        - `batches`: a PyTree of arrays of leading sizes steps, batch; or what
            [`eqxshard.Loader.stacked`][] returns, from which the step itself gathers
            batches.
        - `extra`: as for a single step.

        **Returns:**

        The state after the last step, and the metrics, with one entry per step.

        **Raises:**

        As for a single step.
        """
        return self._run(state, batches, several_batches(batches), extra)

    def lower(
        self, state: TrainState, batch: PyTree, extra: PyTree = None
    ) -> jax.stages.Lowered:
        """Lower a single step, for its text, cost and memory.

        **Arguments:**

        - `state`, `batch`, `extra`: as for a call, of arrays or of
            `jax.ShapeDtypeStruct`s; not donated.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        return self._lower(state, batch, ONE_BATCH, extra)

    def lower_many(
        self, state: TrainState, batches: PyTree, extra: PyTree = None
    ) -> jax.stages.Lowered:
        """Lower the program of `many`.

        **Arguments:**

        - `state`, `batches`, `extra`: as for `many`, of arrays or of
            `jax.ShapeDtypeStruct`s; not donated.

        **Returns:**

        A `jax.stages.Lowered`.
        """
        return self._lower(state, batches, several_batches(batches), extra)

    def _lower(
        self, state: TrainState, batch: PyTree, kind: StepInput, extra: PyTree
    ) -> jax.stages.Lowered:
        arrays, static = flatten_state(state)
        extra_arrays, signature = take_extra(extra)
        key = static, kind, signature
        compiled = self._compiled.get(key) or self._compile(state, *key)
        compiled.check_shapes(batch)
        return compiled.jitted.lower(arrays, batch, extra_arrays)

    def _run(
        self, state: TrainState, batch: PyTree, kind: StepInput, extra: PyTree
    ) -> tuple[TrainState, Metrics]:
        arrays, static = flatten_state(state)
        extra_arrays, signature = take_extra(extra)
        key = static, kind, signature
        compiled = self._ready.get(key) or self._prepare(state, batch, extra_arrays, key)
        # Negative weights, as far as they are on the host; a step takes others for nan.
        check_weights(batch)
        config = self.config
        kind.check_ready(batch, compiled.mesh, compiled.batch_sharding, config.accumulate)
        if extra_arrays:
            check_not_donated(extra_arrays)
        # JAX 0.10 segfaults on deleted buffers. Only if somebody has read the state can
        # others share its arrays; until then they are donated together, and the first one
        # tells.
        unread = state._values is None
        donated = arrays[0].is_deleted() if unread else any_donated(arrays)
        if donated:
            raise ValueError(DONATED)
        seen = arrays[:1] if unread else arrays
        kept = [*jax.tree.leaves(batch), *extra_arrays]
        arrays = copy_taken(seen, kept) + arrays[len(seen) :]
        self._in_flight.make_room()
        if state._flat is None:
            # Not from a step, so it may be anywhere.
            check_shardings(state, compiled.shardings)
            arrays = copy_shared(filter_shard(arrays, compiled.shardings))
        try:
            arrays, metrics = compiled.jitted(arrays, batch, extra_arrays)
        except (TypeError, ValueError):
            # Blame the inputs if they are at fault. (Checking them before each call would
            # take as long as the rest of it; errors of a running step are other types.)
            compiled.check_inputs(state, batch)
            raise
        except FloatingPointError as error:
            if not arrays[0].is_deleted():
                error.add_note(_DEBUG_NANS)
            raise
        state = unflatten_state(arrays, static)
        if self.config.nonfinite == "raise":
            _raise_if_nonfinite(state, metrics, kind.count(batch, metrics))
        self._in_flight.add(metrics.weight)
        return state, metrics

    def _prepare(
        self, state: TrainState, batch: PyTree, extra_arrays: list[Any], key: _Key
    ) -> CompiledStep:
        """Compile a step before its first call, and lint it."""
        check_weights(fetch_weights(batch))
        compiled = self._compiled.get(key) or self._compile(state, *key)
        if self._lint.is_on:
            try:
                program = compiled.compile(state, batch, extra_arrays)
                findings = list(compiled.lint(program, state, batch))
            except (TypeError, ValueError):
                compiled.check_inputs(state, batch)
                raise
            where = f"the train step of {function_name(self.config.loss_fn)}"
            self._lint.report(findings, where)
        self._ready[key] = compiled
        return compiled

    def _inspect(
        self, state: TrainState, batch: PyTree, extra: PyTree = None
    ) -> tuple[Program, tuple[Finding, ...]]:
        """Compile a single step; also return what lint finds in it, whatever the level."""
        _, static = flatten_state(state)
        extra_arrays, signature = take_extra(extra)
        key = static, ONE_BATCH, signature
        compiled = self._compiled.get(key) or self._compile(state, *key)
        compiled.check_shapes(batch)
        program = compiled.compile(state, batch, extra_arrays)
        return program, tuple(compiled.lint(program, state, batch))

    def _compile(
        self, state: TrainState, static: Static, kind: StepInput, extra: Signature | None
    ) -> CompiledStep:
        compiled = CompiledStep(self.config, state, kind, extra, self._compile_log)
        check_shardings(state, compiled.shardings)
        self._compiled[static, kind, extra] = compiled
        return compiled


def _raise_if_nonfinite(state: TrainState, metrics: Metrics, taken: int) -> None:
    steps = np.ravel(metrics.nonfinite)
    if steps.any():
        number = int(state.step) - taken + 1 + int(np.argmax(steps))
        raise FloatingPointError(
            f"the loss, a gradient or an update was not finite in step {number}; look at "
            "its batch, or use nonfinite='skip' to leave such steps out."
        )
