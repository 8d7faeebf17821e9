"""What a step is compiled for, its `Key`; and how train and eval steps are called.

`StepMachine` looks up the program of a key, checks the arguments, and calls it.
"""

import collections
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._errors import UsageError
from ..compiled._findings import Finding, Lint, lint_levels, report
from ..sharding._batch_weights import check_weights, fetch_weights
from ..sharding._leaves import array_leaves
from ..sharding._mesh import format_sharding
from ..sharding._placement import filter_shard
from ..transforms._compiles import CompileLog, function_name
from ._advice import shorten_traceback
from ._donation import (
    Separate,
    check_not_donated,
    check_state_not_donated,
    copy_shared,
    copy_taken,
)
from ._inputs import NOTHING, Signature, StepInput, is_elsewhere, placed
from ._jit import Program, call_jitted, jit_on
from ._memory import (
    Memory,
    arguments_of,
    explaining_state,
    is_out_of_memory,
    says_what_it_needs,
)
from ._metrics import Metrics
from ._precision import Precision
from ._state import TrainState, flatten_state, unflatten_state

#: Two keep a device busy while the host prepares the next. More only hold memory, and
#: simulated CPU devices, whose collectives share one pool of threads, deadlock after some
#: hundreds.
IN_FLIGHT = 2


class Key(NamedTuple):
    """What the program of a step depends on.

    - `static`: all of the state but its arrays, a `Static`; `None` for a step without one.
    - `signature`: that of what the step keeps: the model to measure, or the `extra`; `None`
        for nothing.
    - `kind`: one batch or several.
    """

    static: Any
    signature: Signature | None
    kind: StepInput

    @property
    def kept(self) -> Any:
        """The signature of what the step keeps, or of nothing."""
        return self.signature or NOTHING


@dataclass
class Variant:
    """The program of a step for one key.

    - `fn`: a pure function from the arrays of a state, those that are kept, and a batch, to
        new arrays and metrics.
    - `mesh`: the mesh that it runs on.
    - `precision`, `accumulate`: as for [`eqxshard.make_train_step`][].
    - `rule`, `shardings`: of the state: the sharding of each of its arrays.
    - `jitted`: the function compiled.
    - `batch_sharding`: that of a batch; `None` for any.
    - `is_new`: whether it is still to be called, and linted.
    - `memory`: what it needs, once it is known.
    """

    fn: Callable[..., tuple[list[Any], Metrics]]
    mesh: Mesh
    precision: Precision | None
    accumulate: int = 1
    rule: Any = None
    shardings: Sequence[NamedSharding] = ()
    jitted: Any = None
    batch_sharding: NamedSharding | None = None
    is_new: bool = True
    memory: Memory | None = None


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
        shapes = self.key.kind.shapes(batch, self.variant.mesh)
        return self.variant.jitted.lower(self.arrays, self.kept, shapes)


class InFlight:
    """Holds one result of each call that may not have finished, and bounds their number."""

    def __init__(self):
        self._results: collections.deque[Any] = collections.deque()

    def make_room(self, count: int = 1) -> None:
        """Wait for the oldest until there is room for some more.

        Before a call, which takes its donated inputs: an interrupt finds them whole.
        """
        while len(self._results) > IN_FLIGHT - count:
            oldest = self._results.popleft()
            # NumPy's has no such method: a user's own step may return one.
            wait = getattr(oldest, "block_until_ready", bool)
            wait()

    def add(self, result: Any) -> None:
        """Add a result, for which there is room."""
        self._results.append(result)


class StepMachine:
    """The programs of a step, each made when it is first needed: look up, check, call.

    **Arguments:**

    - `name`: that of a single step in profiles and compiled modules.
    - `user_fn`: the function that the step is for.
    - `keeps`: what errors call what the step keeps.
    - `make`: makes the program for a key, but for what is compiled, given the state and
        the arrays that are kept.
    - `max_compiles`, `lint`, `compiler_options`: as for [`eqxshard.make_train_step`][].

    **Raises:**

    `ValueError` if `lint` is invalid.
    """

    def __init__(
        self,
        name: str,
        user_fn: Callable[..., Any],
        keeps: str,
        make: Callable[[Any, list[Any], Key], Variant],
        max_compiles: int | None,
        lint: Lint,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        self._name = name
        self._of = function_name(user_fn)
        self._keeps = keeps
        self._make = make
        self._log = CompileLog(max_compiles)
        self._levels = lint_levels(lint)
        self._compiler_options = compiler_options
        self._reported: set[Finding] = set()
        self._variants: dict[Key, Variant] = {}
        self._in_flight = InFlight()
        self._separate = Separate()

    def look_up(self, state: TrainState | None, kept: PyTree, kind: StepInput) -> Call:
        """The program for a state, or none, and for what is kept, or nothing."""
        arrays, static = ([], None) if state is None else flatten_state(state)
        kept, signature = ([], None) if kept is None else Signature.of(kept, self._keeps)
        key = Key(static, signature, kind)
        variant = self._variants.get(key)
        if variant is None:
            variant = self._make(state, kept, key)
            if state is not None:
                check_shardings(state, variant.shardings)
            self._jit(variant, key)
            self._variants[key] = variant
        return Call(key, variant, state, arrays, kept)

    def _jit(self, step: Variant, key: Key) -> None:
        static, signature, kind = key.static, key.kept, key.kind
        signature.check_on(step.mesh, self._keeps)

        def tracing(
            arrays: list[Any], kept: list[Any], batch: PyTree
        ) -> contextlib.AbstractContextManager[None]:
            kind.check(batch, step.mesh, step.accumulate)
            arguments = {"batch": batch, self._keeps: signature.static.combine(kept)}
            made_with = None
            if static is not None:
                arguments["state"] = state = static.combine(arrays)
                made_with = state.made_with
            program, made_for = self._named(key, batch), (made_with, step.mesh)
            return self._log.compiling(program, arguments, made_for)

        replicated = NamedSharding(step.mesh, PartitionSpec())
        step.batch_sharding = kind.sharding(step.mesh)
        step.jitted = jit_on(
            step.mesh,
            kind.repeat(step.fn, step.mesh),
            self._name + kind.suffix,
            tracing,
            donate_argnums=0,
            in_shardings=([*step.shardings], None, step.batch_sharding),
            out_shardings=([*step.shardings], replicated),
            compiler_options=self._compiler_options,
        )

    def run(self, call: Call, batch: PyTree) -> tuple[Any, Metrics]:
        """Take a step, or several; at most two calls are in flight.

        **Returns:**

        The new state, if there is one, and the metrics.
        """
        key, step, state, arrays, kept = call
        # Negative weights, as far as they are on the host; a step takes others for nan.
        check_weights(fetch_weights(batch) if step.is_new else batch)
        given, place = batch, step.batch_sharding
        batch = placed(
            key.kind, batch, step.mesh, place, step.accumulate, is_new=step.is_new
        )
        if kept:
            check_not_donated(kept, self._keeps)
        if state is not None:
            # Until somebody reads a state, nothing else has its arrays. Then they are
            # donated together, and the first one tells.
            is_unread = state._values is None
            seen = arrays[:1] if is_unread else arrays
            if seen is arrays or arrays[0].is_deleted():
                check_state_not_donated(seen)
            taken = jax.tree.leaves(given)
            if kept and not (state._flat and self._separate.knows(arrays, kept)):
                taken += kept
            arrays = copy_taken(seen, taken) + arrays[len(seen) :]
        is_new = step.is_new
        try:
            self._in_flight.make_room()
            if is_new and {*self._levels.values()} != {"off"}:
                made, findings = self.inspect(call, batch)
                step.memory = Memory.of(self._named(key, batch), call, batch, made)
                self._report(findings)
            step.is_new = False
            if state is not None and state._flat is None:
                # Not from a step, so it may be anywhere.
                check_shardings(state, step.shardings)
                arrays = copy_shared(filter_shard(arrays, [*step.shardings]))
            if is_new:
                # Where these could not be made, the step is not to blame.
                with explaining_state(arguments_of(call)):
                    jax.block_until_ready((arrays, kept))
            arrays, metrics = call_jitted(step.jitted, arrays, kept, batch)
            if is_new:
                # Most steps that do not fit fail the first time, and say so here.
                jax.block_until_ready(metrics)
        except Exception as error:
            if is_out_of_memory(error) and not says_what_it_needs(error):
                if step.memory is None:
                    step.memory = Memory.of(self._named(key, batch), call, batch)
                error.add_note(step.memory.describe())
            # Blame the inputs if they are at fault. (Checking them before each call would
            # take as long as the rest of it; errors of a running step are other types.)
            if isinstance(error, TypeError | ValueError):
                if state is not None:
                    check_shardings(state, step.shardings)
                key.kind.check(batch, step.mesh, step.accumulate)
            shorten_traceback(error)
            raise
        self._in_flight.add(metrics.weight)
        if kept and state is not None:
            self._separate.returned(arrays, kept)
        return None if state is None else unflatten_state(arrays, key.static), metrics

    def describe_memory(self) -> str | None:
        """What the largest of the programs needs, and what to do if it does not fit."""
        known = [x.memory for x in self._variants.values() if x.memory is not None]
        most = max(known, key=lambda memory: memory.peak or 0, default=None)
        return most and most.describe()

    def _named(self, key: Key, batch: PyTree) -> str:
        return f"{key.kind.program(self._name, batch)} of {self._of}"

    def compile(self, call: Call, batch: PyTree) -> Program:
        """Compile the program.

        Arrays are taken to be where the program takes them, wherever they are.
        """
        state = [
            _abstract(array, sharding)
            for array, sharding in zip(call.arrays, call.variant.shardings)
        ]
        # A call with arguments like them compiles nothing then: JAX keeps the executable.
        shapes = call.key.kind.shapes(batch, call.variant.mesh)
        traced = call.variant.jitted.trace(state, call.kept, shapes)
        return Program(traced.jaxpr, traced.lower().compile())

    def inspect(self, call: Call, batch: PyTree) -> tuple[Program, list[Finding]]:
        """Compile the program; also return what lint finds in it, whatever the level."""
        # Only a first call needs it, and what reads compiled programs.
        from ._lint import lint_step

        program = self.compile(call, batch)
        return program, [*lint_step(call, program, batch)]

    def _report(self, findings: list[Finding]) -> None:
        """Warn of findings, or raise `ValueError`; of each once."""
        where = f"the {self._name.replace('_', ' ')} of {self._of}"
        report([x for x in findings if x not in self._reported], self._levels, where)
        self._reported.update(findings)


def _abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=weak)


def check_shardings(state: TrainState, shardings: Sequence[NamedSharding]) -> None:
    """Refuse a donated state, and one that is sharded by another mesh or rule."""
    leaves = array_leaves(state)
    check_state_not_donated([leaf for _, leaf in leaves])
    for (path, leaf), wanted in zip(leaves, shardings, strict=True):
        if is_elsewhere(leaf, wanted):
            raise UsageError(
                f"{path} is sharded as {format_sharding(leaf.sharding)}, and the step "
                f"expects {format_sharding(wanted)}; make the state and the step with the "
                "same mesh and rule, or move the state with filter_shard."
            )
