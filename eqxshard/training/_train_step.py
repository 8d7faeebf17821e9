"""The train step: a batch goes in, a new state comes out, in one donated compiled call."""

import functools as ft
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from .._errors import NonfiniteError, UsageError, UsageTypeError
from ..compiled._findings import Lint
from ..sharding._leaves import array_leaves
from ..sharding._rule import Rule
from ..sharding._spec import AnyMesh
from ._examples import Metrics
from ._init import check_has_arrays
from ._inputs import ONE_BATCH, DeviceBatches, several_batches
from ._optimizer import check_numbers, check_optim, is_optimizer
from ._precision import Precision
from ._state import TrainState, make_layout, split_model
from ._step import Key, StepMachine, Variant
from ._update import Nonfinite, StepConfig, train_step


def make_train_step(
    loss_fn: Callable[..., Any],
    optim: optax.GradientTransformation,
    *,
    mesh: AnyMesh | None = None,
    rule: Rule | None = None,
    trainable: PyTree = None,
    accumulate: int = 1,
    precision: Precision | None = None,
    nonfinite: Nonfinite = "skip",
    grad_norms: bool = False,
    max_compiles: int | None = None,
    lint: Lint = "warn",
    compiler_options: Mapping[str, Any] | None = None,
) -> "TrainStep":
    """Make the compiled step: gradients, optimizer, new state, in one donated call.

    The batch is split over the `data` and `fsdp` axes of the mesh, parameters and
    optimizer state as the rule says. Parameters that the rule splits over an axis of the
    batch are gathered where they are used, and their gradients are reduced back to where
    they are stored.

    Before it is compiled, the step is rewritten where XLA would do badly or wrongly:
    convolutions, scatters, gradients of embedding tables, updates that need whole matrices,
    and checks by `equinox.error_if`. Apart from rounding, that changes nothing.
    `EQXSHARD_REWRITE=off` in the environment turns it off; a check that fails on several
    devices then never returns, and stacked layers are gathered all at once.

    **Arguments:**

    - `loss_fn`: `loss_fn(model, batch, key)` returns `losses` or `(losses, metrics)`.
        `losses` has one floating-point number per example of the batch, or is a scalar,
        their mean. Each entry of the dict `metrics` has one number or array per example,
        or is a scalar; its name is not `loss` or `nonfinite`. The step minimises the mean
        over examples. If the batch is a dict, its entry `"__weight__"` says how much each
        example counts, in the loss and in metrics, and `"__loss_weight__"` how much in
        the loss alone; both need losses per example. Weights are not negative, nor is the
        sum of loss weights. If no loss of a batch counts, the step changes nothing but
        `state.step`, and its loss is not reported. Examples of weight 0 have no loss of
        their own, but a loss that compares examples, such as a contrastive one, still
        sees them, and has to mask them itself. They may contain nan, for which the loss
        function gets 0; but an infinite slope at their finite values, such as that of a
        root at 0, makes the gradient nan, because 0 times infinity is.
        For a model with state, `model` is the pair `(model, state)`, and the new state is
        returned last: `(losses, state)` or `(losses, metrics, state)`. If the step is
        given an `extra`, it is the fourth argument.
    - `optim`: an optax optimizer, the one the state was made with. It gets gradients that
        point uphill, which for complex parameters are the conjugates of `jax.grad`'s.
    - `mesh`, `rule`, `trainable`, `precision`: by default those that
        [`eqxshard.init_state`][] made the state with. A step does not change the types of
        parameters, so `precision.params` must be that of the state.
    - `accumulate`: split the batch into this many microbatches and take their gradients in
        turn, to save memory. With losses and metrics per example, none of which looks at
        another example, the result is that of the whole batch, whatever the weights. A
        scalar is averaged over microbatches, which a warning says: return values per
        example where some count more, such as in a mean over tokens. Each microbatch gets
        a key of its own, and a model's state passes from one to the next.
    - `nonfinite`: what to do if the loss, a gradient or a value that the step would write
        is not finite. Such values are the parameters, the optimizer's state and the model's
        own, where they were finite before. `"skip"` leaves all of these exactly as they
        were, counts the step in `Metrics.nonfinite` and excludes it from means; `"raise"`
        waits for every step and raises (the state was donated, so continue from what you
        saved); `"ignore"` does not check.
    - `grad_norms`: whether to add a metric `grad_norm`, the norm of all gradients before
        the optimizer sees them.
    - `max_compiles`: how many times the step may compile; one more raises. By default it
        may compile any number of times. For each compilation that is not expected, the log
        says which argument changed. (The first of a single step is expected, and the first
        of `many` for each number of batches.) The step keeps the 64 programs that were used
        last.
    - `lint`: what to do about findings when the step first compiles: `"warn"` (with an
        [`eqxshard.inspect.LintWarning`][]), `"error"` (raise before it runs) or `"off"`; or
        a mapping from kinds of findings to one of these, where the other kinds warn.
        [`eqxshard.lint`][] describes them.
    - `compiler_options`: options of XLA, as for `jax.jit`.

    **Returns:**

    An [`eqxshard.training.TrainStep`][]: `state, metrics = train_step(state, batch)`.

    **Raises:**

    `TypeError` if `optim` is not an optimizer, or `loss_fn` is one. `ValueError` if
    `accumulate`, `nonfinite`, `max_compiles` or `lint` is invalid, or `nonfinite` does not
    suit float16, which needs `"skip"`. When the step is first called, `ValueError` if XLA
    does not know one of `compiler_options`.

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
    if is_optimizer(loss_fn):
        raise UsageTypeError(
            "loss_fn is an optimizer; write make_train_step(loss_fn, optim)."
        )
    check_optim(optim)
    config = StepConfig(
        loss_fn=loss_fn,
        optim=optax.with_extra_args_support(optim),
        mesh=mesh,
        rule=rule,
        trainable=trainable,
        accumulate=accumulate,
        precision=precision,
        nonfinite=nonfinite,
        grad_norms=grad_norms,
    )
    make = ft.partial(_make_pure, config)
    machine = StepMachine(
        "train_step", loss_fn, "extra", make, max_compiles, lint, compiler_options
    )
    return TrainStep(config, machine)


class TrainStep:
    """The step of [`eqxshard.make_train_step`][]: call it with a state and a batch.

    At most two steps are in flight: a call blocks only until the second-to-last step has
    finished.
    """

    def __init__(self, config: StepConfig, machine: StepMachine):
        #: The settings of the step.
        self.config = config
        #: The programs of the step.
        self.machine = machine

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

        The new state, and the [`eqxshard.training.Metrics`][] of this step, without waiting
        for either. (The first call waits, as most steps that need too much memory fail
        there.)

        **Raises:**

        `ValueError` if the batch does not divide over the mesh, the state was donated
        before or belongs to another mesh, rule or optimizer, the step would compile more
        than `max_compiles` times, or lint finds an error (nothing is donated then);
        `FloatingPointError` under `nonfinite="raise"`.
        """
        call = self.machine.look_up(state, extra, ONE_BATCH)
        state, metrics = self.machine.run(call, batch)
        if self.config.nonfinite == "raise":
            _raise_if_nonfinite(state, metrics, batch)
        return state, metrics

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
        call = self.machine.look_up(state, extra, several_batches(batches))
        state, metrics = self.machine.run(call, batches)
        if self.config.nonfinite == "raise":
            _raise_if_nonfinite(state, metrics, batches)
        return state, metrics

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
        return self.machine.look_up(state, extra, ONE_BATCH).lower(batch)


def _make_pure(config: StepConfig, state: TrainState, kept: list[Any], key: Key) -> Variant:
    """The step for states of one structure."""
    config = config.following(state)
    mesh, rule = config.mesh, config.rule
    assert mesh is not None and rule is not None
    check_has_arrays(state.model)
    params, _ = split_model(state.model, config.trainable)
    _check_optimizer(config, state, params)
    layout = make_layout(state.model, params, state.opt_state, mesh, rule)
    fn = ft.partial(train_step, config, layout, key.static, key.kept)
    shardings = layout.flat(state)
    return Variant(fn, mesh, config.precision, config.accumulate, rule, shardings)


def _check_optimizer(config: StepConfig, state: TrainState, params: PyTree) -> None:
    """Refuse a state of another optimizer or filter spec, or with another loss scale."""
    fresh = eqx.filter_eval_shape(config.optim.init, params)
    if jax.tree.structure(fresh) != jax.tree.structure(state.opt_state):
        raise UsageError(
            "the optimizer state in this TrainState does not fit this optimizer and "
            "model; use the optimizer, and trainable=, that the state was made with."
        )
    check_numbers(state.opt_state)
    _check_precision(config, state, params)
    scales_loss = config.precision is not None and config.precision.scales_loss
    if scales_loss != (state.loss_scale is not None):
        raise UsageError(
            "only one of this TrainState and this step has a loss scale; make both with "
            "the same precision=."
        )


def _check_precision(config: StepConfig, state: TrainState, params: PyTree) -> None:
    """Refuse a precision that the state does not have: only `init_state` applies it."""
    mine, made = config.precision, state.made_with and state.made_with.precision
    if mine is None or mine == made:
        return
    remedy = "give init_state and the step the same precision="
    wanted = jnp.dtype(mine.params)
    types = {x.dtype for _, x in array_leaves(params)}
    others = {x for x in types if jnp.issubdtype(x, jnp.floating)} - {wanted}
    # A state that was made without a precision has the types that `make_model` chose.
    if others and (made is not None or wanted != jnp.dtype(Precision.params)):
        raise UsageError(
            f"the step has Precision(params={wanted.name}), and the state has parameters "
            f"of {others.pop().name}, which a step does not change; {remedy}."
        )
    if made is not None and mine.scales_loss and mine.initial_scale != made.initial_scale:
        raise UsageError(
            f"the step has Precision(initial_scale={mine.initial_scale}), and the state "
            f"was made with {made.initial_scale}; {remedy}."
        )


def _raise_if_nonfinite(state: TrainState, metrics: Metrics, batch: PyTree) -> None:
    """Wait for a step, or for several, and raise if one was not finite."""
    steps = np.ravel(jax.device_get(metrics.nonfinite))
    if steps.any():
        taken = batch.count if isinstance(batch, DeviceBatches) else steps.size
        last, count = jax.device_get((state.step, taken))
        number = int(last) - int(count) + 1 + int(np.argmax(steps))
        raise NonfiniteError(
            f"the loss, a gradient or an update was not finite in step {number}; find the "
            "line with eqxshard.first_nonfinite and a state from before, such as a "
            "checkpoint's, or use nonfinite='skip' to leave such steps out."
        )
