"""The train step: a batch goes in, a new state comes out, in one donated compiled call."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..sharding._leaves import array_leaves
from ..sharding._mesh import format_sharding
from ..sharding._placement import filter_shard
from ..sharding._rule import Rule
from ..transforms._compiles import CompileLog, Watch, function_name
from ..transforms._partition import Static
from ._compile import jit_on
from ._config import Nonfinite, ResolvedConfig, StepConfig, check_optim
from ._extra import Signature, check_not_donated, copy_shared, copy_taken, take_extra
from ._gradients import LossInputs
from ._in_flight import InFlight
from ._inputs import ONE_BATCH, StepInput, is_elsewhere, several_batches
from ._layout import fetch_offloaded, make_layout, offload_to_host
from ._metrics import Metrics
from ._precision import Precision
from ._state import TrainState, flatten_state, split_model, unflatten_state
from ._update import update_state

DONATED = (
    "this state was donated to an earlier step, and its model with it; use the state that "
    "the step returned."
)


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
) -> "TrainStep":
    """Make the compiled step: gradients, optimizer, new state, in one donated call.

    The batch is split over the `data` and `fsdp` axes of the mesh, parameters and
    optimizer state as the rule says. Parameters that the rule splits over an axis of the
    batch are gathered where they are used, and their gradients are reduced back to where
    they are stored.

    **Arguments:**

    - `loss_fn`: `loss_fn(model, batch, key)` returns `losses` or `(losses, metrics)`.
        `losses` has one entry per example of the batch, or is a scalar, their mean. Each
        entry of the dict `metrics` has one number or array per example, or is a scalar;
        its name is not `loss` or `nonfinite`. The step minimises the mean over examples.
        If the batch is a dict, its entry `"weight"` says how much each example counts, in
        the loss and in metrics (0 for padding, whose values may be anything whose
        gradient is finite), and `"loss_weight"` how much in the loss alone; both need
        losses per example. For a model with state, `model` is the pair `(model, state)`,
        and the new state is returned last: `(losses, state)` or `(losses, metrics,
        state)`. If the step is given an `extra`, it is the fourth argument.
    - `optim`: an optax optimizer, the one the state was made with.
    - `mesh`, `rule`, `trainable`, `precision`: by default those that
        [`eqxshard.init_state`][] made the state with.
    - `accumulate`: split the batch into this many microbatches and take their gradients
        in turn, to save memory. The result is that of the whole batch, whatever the
        weights; each microbatch gets a key of its own, and a model's state passes from
        one to the next.
    - `nonfinite`: what to do if the loss or a gradient is not finite. `"skip"` leaves
        parameters and optimizer state exactly as they were, counts the step in
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

    **Returns:**

    An [`eqxshard.TrainStep`][]: `state, metrics = train_step(state, batch)`.

    **Raises:**

    `ValueError` if `accumulate`, `nonfinite` or `max_compiles` is invalid, or `nonfinite`
    does not suit float16, which needs `"skip"`.

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
    )


class TrainStep:
    """What [`eqxshard.make_train_step`][] returns: call it with a state and a batch.

    At most two steps are in flight: a call blocks only until the second-to-last step has
    finished.
    """

    def __init__(self, config: StepConfig, compile_log: CompileLog):
        #: The settings of the step.
        self.config = config
        self._compile_log = compile_log
        self._compiled: dict[tuple[Static, StepInput, Signature | None], _CompiledStep] = {}
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
        more than `max_compiles` times (nothing is donated then); `FloatingPointError`
        under `nonfinite="raise"`.
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
        arrays, static = flatten_state(state)
        extra_arrays, signature = take_extra(extra)
        key = static, ONE_BATCH, signature
        compiled = self._compiled.get(key) or self._compile(state, *key)
        compiled.check_shapes(batch)
        return compiled.jitted.lower(arrays, batch, extra_arrays)

    def _run(
        self, state: TrainState, batch: PyTree, kind: StepInput, extra: PyTree
    ) -> tuple[TrainState, Metrics]:
        arrays, static = flatten_state(state)
        extra_arrays, signature = take_extra(extra)
        key = static, kind, signature
        compiled = self._compiled.get(key) or self._compile(state, *key)
        if extra_arrays:
            check_not_donated(extra_arrays)
            arrays = copy_taken(arrays, extra_arrays)
        self._in_flight.make_room()
        if state._flat is None:
            # Not from a step, so it may be anywhere.
            check_shardings(state, compiled.shardings)
            arrays = copy_shared(filter_shard(arrays, compiled.shardings))
        elif arrays[0].is_deleted():
            # JAX 0.10 segfaults on deleted buffers. One check suffices: all are donated
            # together.
            raise ValueError(DONATED)
        try:
            arrays, metrics = compiled.jitted(arrays, batch, extra_arrays)
        except (TypeError, ValueError):
            # Blame the inputs if they are at fault. (Checking them before each call would
            # take as long as the rest of it; errors of a running step are other types.)
            compiled.check_inputs(state, batch)
            raise
        state = unflatten_state(arrays, static)
        if self.config.nonfinite == "raise":
            _raise_if_nonfinite(state, metrics, kind.count(batch, metrics))
        self._in_flight.add(metrics.weight)
        return state, metrics

    def _compile(
        self, state: TrainState, static: Static, kind: StepInput, extra: Signature | None
    ) -> "_CompiledStep":
        compiled = _CompiledStep(self.config, state, kind, extra, self._compile_log)
        check_shardings(state, compiled.shardings)
        self._compiled[static, kind, extra] = compiled
        return compiled


class _CompiledStep:
    """The step for states of one structure and one kind of input, over flat arrays."""

    def __init__(
        self,
        config: StepConfig,
        state: TrainState,
        kind: StepInput,
        extra: Signature | None,
        compile_log: CompileLog,
    ):
        arrays, static = flatten_state(state)
        self._config = config = config.of(state, arrays)
        self._kind = kind
        mesh = config.mesh
        params, _ = split_model(state.model, config.trainable)
        _check_optimizer(config, state, params)
        layout = make_layout(state.model, params, state.opt_state, mesh, config.rule)
        #: The sharding of each array of a state.
        self.shardings = layout.flat(state)

        def train_step(
            arrays: list[Array], batch: PyTree, extra_arrays: list[Array]
        ) -> tuple[list[Array], Metrics]:
            given = () if extra is None else (extra.static.combine(extra_arrays),)
            inputs = LossInputs(layout, given, () if extra is None else (extra.storage(),))

            def one_step(arrays: list[Array], batch: PyTree) -> tuple[list[Array], Metrics]:
                fields = static.combine(fetch_offloaded(arrays, self.shardings))
                state, metrics = update_state(config, inputs, TrainState(*fields), batch)
                return offload_to_host(flatten_state(state)[0], self.shardings), metrics

            self.check_shapes(batch)
            return kind.run(one_step, arrays, batch, mesh)

        # The name in profiles and compiled modules.
        train_step.__name__ += kind.suffix

        def name_arguments(
            arrays: list[Any], batch: PyTree, extra_arrays: list[Any]
        ) -> tuple[str, dict[str, PyTree]]:
            program = kind.program("train_step", batch)
            given = None if extra is None else extra.static.combine(extra_arrays)
            arguments = {"state": static.combine(arrays), "batch": batch, "extra": given}
            return f"{program} of {function_name(config.loss_fn)}", arguments

        whole = NamedSharding(mesh, PartitionSpec())
        #: The compiled function, from arrays and a batch to arrays and metrics.
        self.jitted = jit_on(
            mesh,
            train_step,
            Watch(compile_log, train_step.__name__, name_arguments),
            donate_argnums=0,
            in_shardings=(self.shardings, kind.sharding(mesh), None),
            out_shardings=(self.shardings, whole),
        )

    def check_shapes(self, batch: PyTree) -> None:
        """Raise `ValueError` unless the rows of a batch divide over the mesh."""
        self._kind.check_shapes(batch, self._config.mesh, self._config.accumulate)

    def check_inputs(self, state: TrainState, batch: PyTree) -> None:
        """Raise `ValueError` if a state or a batch does not fit this step."""
        self.check_shapes(batch)
        check_shardings(state, self.shardings)
        self._kind.check_placement(batch, self._config.mesh)


def check_shardings(state: TrainState, shardings: list[NamedSharding]) -> None:
    """Refuse a donated state, and one that is sharded by another mesh or rule."""
    for (path, leaf), wanted in zip(array_leaves(state), shardings, strict=True):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(DONATED)
        if is_elsewhere(leaf, wanted):
            raise ValueError(
                f"{path} is sharded as {format_sharding(leaf.sharding)}, and the step "
                f"expects {format_sharding(wanted)}; make the state and the step with the "
                "same mesh and rule, or move the state with filter_shard."
            )


def _check_optimizer(config: ResolvedConfig, state: TrainState, params: PyTree) -> None:
    """Refuse a state of another optimizer or filter spec, or with another loss scale."""
    fresh = eqx.filter_eval_shape(config.optim.init, params)
    if jax.tree.structure(fresh) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "the optimizer state in this TrainState does not fit this optimizer and "
            "model; use the optimizer, and trainable=, that the state was made with."
        )
    scales_loss = config.precision is not None and config.precision.scales_loss
    if scales_loss != (state.loss_scale is not None):
        raise ValueError(
            "only one of this TrainState and this step has a loss scale; make both with "
            "the same precision=."
        )


def _raise_if_nonfinite(state: TrainState, metrics: Metrics, taken: int) -> None:
    steps = np.ravel(metrics.nonfinite)
    if steps.any():
        number = int(state.step) - taken + 1 + int(np.argmax(steps))
        raise FloatingPointError(
            f"the loss or a gradient was not finite in step {number}; look at its batch, "
            "or use nonfinite='skip' to leave such steps out."
        )
