"""What train and eval steps have in common: look up a program, check, call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..compiled._findings import Finding
from ..data._weights import check_weights, fetch_weights
from ..sharding._leaves import array_leaves
from ..sharding._mesh import format_sharding
from ..sharding._placement import filter_shard
from ..transforms._compiles import CompileLog, function_name
from ._donation import (
    DONATED,
    any_donated,
    check_not_donated,
    check_state_not_donated,
    copy_shared,
    copy_taken,
)
from ._in_flight import InFlight
from ._inputs import StepInput, is_elsewhere
from ._jit import Jitted, Program, jit_on
from ._lint import StepLint, lint_step
from ._metrics import Metrics
from ._precision import Precision
from ._signature import Signature
from ._state import TrainState, flatten_state, unflatten_state

_DEBUG_NANS = (
    "jax_debug_nans raised this, whatever nonfinite= is. The state was not donated, so go "
    "on from it. To find the cause, turn jax_debug_nans off and replay the crash dump that "
    "eqxshard.fit writes."
)


class Key(NamedTuple):
    """What the program of a step depends on.

    - `static`: all of the state but its arrays, a `Static`; `None` for a step without one.
    - `kept`: the `Signature` of what the step keeps: the model to measure, or the `extra`;
        `None` for nothing.
    - `kind`: one batch or several.
    """

    static: Any
    kept: Any
    kind: StepInput


class PureStep(NamedTuple):
    """A step for one key, as a pure function.

    - `fn`: from the arrays of a state, those that are kept, and a batch, to new arrays and
        metrics.
    - `mesh`: the mesh that it runs on.
    - `precision`, `accumulate`: as for [`eqxshard.make_train_step`][].
    - `rule`, `shardings`: of the state: the sharding of each of its arrays.
    """

    fn: Callable[..., tuple[list[Any], Metrics]]
    mesh: Mesh
    precision: Precision | None
    accumulate: int = 1
    rule: Any = None
    shardings: Sequence[NamedSharding] = ()


@dataclass
class Variant:
    """The program of a step for one key.

    - `step`, `jitted`: the pure step, and the same compiled.
    - `batch_sharding`: that of a batch; `None` for any.
    - `is_new`: whether it is still to be called, and linted.
    """

    step: PureStep
    jitted: Jitted
    batch_sharding: NamedSharding | None
    is_new: bool = True


class Call(NamedTuple):
    """The arguments of a step but for the batch, and the program for them.

    - `key`, `variant`: the program.
    - `state`, `arrays`: the state, if there is one, and its arrays.
    - `kept`: the arrays of what the step keeps.
    """

    key: Key
    variant: Variant
    state: TrainState | None
    arrays: list[Any]
    kept: list[Any]

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """Lower the program."""
        return self.variant.jitted.lower(self.arrays, self.kept, batch)

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the state as the program takes them, wherever they are."""
        pairs = zip(self.arrays, self.variant.step.shardings, strict=True)
        return [_abstract(array, sharding) for array, sharding in pairs]

    def findings(self, program: Program, batch: PyTree) -> tuple[Finding, ...]:
        """What lint finds in the program, as it was compiled for a batch."""
        return tuple(lint_step(self, program, batch))

    def check(self, batch: PyTree) -> None:
        """Raise `ValueError` if the state or a batch does not fit the program."""
        step = self.variant.step
        if self.state is not None:
            check_shardings(self.state, step.shardings)
        self.key.kind.check(batch, step.mesh, step.accumulate)


class StepMachine:
    """The programs of a step, each made when it is first needed: look up, check, call.

    **Arguments:**

    - `name`: that of a single step in profiles and compiled modules.
    - `user_fn`: the function that the step is for.
    - `keeps`: what errors call what the step keeps.
    - `make`: makes the pure step for a key, given the state and the arrays that are kept.
    - `log`, `lint`: what to do about compiles and findings.
    """

    def __init__(
        self,
        name: str,
        user_fn: Callable[..., Any],
        keeps: str,
        make: Callable[[Any, list[Any], Key], PureStep],
        log: CompileLog,
        lint: StepLint,
    ):
        self._name = name
        self._of = function_name(user_fn)
        self._keeps = keeps
        self._make = make
        self._log = log
        self._lint = lint
        self._variants: dict[Key, Variant] = {}
        self._in_flight = InFlight()

    def look_up(self, state: TrainState | None, kept: PyTree, kind: StepInput) -> Call:
        """The program for a state, or none, and for what is kept.

        Beside a state, that may be nothing: `None`. (A model may be `None`.)
        """
        arrays, static = ([], None) if state is None else flatten_state(state)
        keeps = kept is not None or state is None
        kept, signature = Signature.of(kept, self._keeps) if keeps else ([], None)
        key = Key(static, signature, kind)
        variant = self._variants.get(key)
        if variant is None:
            variant = self._jit(self._make(state, kept, key), key)
            if state is not None:
                check_shardings(state, variant.step.shardings)
            self._variants[key] = variant
        return Call(key, variant, state, arrays, kept)

    def _jit(self, step: PureStep, key: Key) -> Variant:
        static, signature, kind = key
        if signature is not None:
            signature.check_on(step.mesh, self._keeps)

        def on_trace(arrays: list[Any], kept: list[Any], batch: PyTree) -> None:
            kind.check(batch, step.mesh, step.accumulate)
            arguments = {"batch": batch}
            if static is not None:
                arguments["state"] = static.combine(arrays)
            if signature is not None:
                arguments[self._keeps] = signature.static.combine(kept)
            self._log.add(f"{kind.program(self._name, batch)} of {self._of}", arguments)

        replicated = NamedSharding(step.mesh, PartitionSpec())
        batch_sharding = kind.sharding(step.mesh)
        jitted = jit_on(
            step.mesh,
            kind.repeat(step.fn, step.mesh),
            self._name + kind.suffix,
            on_trace,
            donate_argnums=0,
            in_shardings=([*step.shardings], None, batch_sharding),
            out_shardings=([*step.shardings], replicated),
        )
        return Variant(step, jitted, batch_sharding)

    def run(self, call: Call, batch: PyTree) -> tuple[Any, Metrics]:
        """Take a step, or several; at most two calls are in flight.

        **Returns:**

        The new state, if there is one, and the metrics.
        """
        key, variant, state, arrays, kept = call
        step, jitted = variant.step, variant.jitted
        # Negative weights, as far as they are on the host; a step takes others for nan.
        check_weights(fetch_weights(batch) if variant.is_new else batch)
        key.kind.check_ready(batch, step.mesh, variant.batch_sharding, step.accumulate)
        if kept:
            check_not_donated(kept, self._keeps)
        if state is not None:
            # Until somebody reads a state, nothing else has its arrays. Then they are
            # donated together, and the first one tells.
            is_unread = state._values is None
            seen = arrays[:1] if is_unread else arrays
            if seen[0].is_deleted() if is_unread else any_donated(seen):
                raise ValueError(DONATED)
            taken = [*jax.tree.leaves(batch), *kept]
            arrays = copy_taken(seen, taken) + arrays[len(seen) :]
        self._in_flight.make_room()
        try:
            if variant.is_new and self._lint.is_on:
                program = jitted.program(call.abstract(), kept, batch)
                where = f"the {self._name.replace('_', ' ')} of {self._of}"
                self._lint.report(call.findings(program, batch), where)
            variant.is_new = False
            if state is not None and state._flat is None:
                # Not from a step, so it may be anywhere.
                check_shardings(state, step.shardings)
                arrays = copy_shared(filter_shard(arrays, [*step.shardings]))
            arrays, metrics = jitted(arrays, kept, batch)
        except (TypeError, ValueError):
            # Blame the inputs if they are at fault. (Checking them before each call would
            # take as long as the rest of it; errors of a running step are other types.)
            call.check(batch)
            raise
        except FloatingPointError as error:
            if arrays and not arrays[0].is_deleted():
                error.add_note(_DEBUG_NANS)
            raise
        self._in_flight.add(metrics.weight)
        return None if state is None else unflatten_state(arrays, key.static), metrics

    def inspect(self, call: Call, batch: PyTree) -> tuple[Program, tuple[Finding, ...]]:
        """Compile the program; also return what lint finds in it, whatever the level."""
        program = call.variant.jitted.program(call.abstract(), call.kept, batch)
        return program, call.findings(program, batch)


def _abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=weak)


def check_shardings(state: TrainState, shardings: Sequence[NamedSharding]) -> None:
    """Refuse a donated state, and one that is sharded by another mesh or rule."""
    leaves = array_leaves(state)
    check_state_not_donated([leaf for _, leaf in leaves])
    for (path, leaf), wanted in zip(leaves, shardings, strict=True):
        if is_elsewhere(leaf, wanted):
            raise ValueError(
                f"{path} is sharded as {format_sharding(leaf.sharding)}, and the step "
                f"expects {format_sharding(wanted)}; make the state and the step with the "
                "same mesh and rule, or move the state with filter_shard."
            )
