"""`StepMachine`: the compiled programs of a train or eval step, and how they are called.

It looks up the program of a `Key`, checks the arguments, and calls it.
"""

import collections
import contextlib
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._errors import ON_PURPOSE, UsageError
from ..compiled._findings import Finding, Lint, lint_levels, report
from ..sharding._batch_weights import check_weights, fetch_weights
from ..sharding._leaves import array_leaves
from ..sharding._mesh import format_sharding
from ..sharding._placement import filter_shard
from ..sharding._spec import AnyMesh
from ..transforms._compiles import MAX_PROGRAMS, CompileLog, function_name
from ._advice import (
    Memory,
    arguments_of,
    explaining_state,
    is_out_of_memory,
    says_what_it_needs,
    shorten_traceback,
)
from ._donation import (
    check_not_donated,
    check_state_not_donated,
    copy_shared,
    donatable,
)
from ._examples import Metrics
from ._inputs import (
    NOTHING,
    Signature,
    StepInput,
    check_devices,
    check_same,
    is_elsewhere,
    placed,
)
from ._jit import Program, call_jitted, jit_on, lower_for
from ._precision import Precision
from ._state import TrainState, flatten_state, unflatten_state

#: Two steps keep a device busy while the host prepares the next. More only hold memory, and
#: simulated CPU devices, whose collectives share one pool of threads, deadlock after some
#: hundreds.
IN_FLIGHT = 2


class Key(NamedTuple):
    """The facts that the program of a step depends on.

    - `static`: the state without its arrays, a `Static`; `None` for a step without a state.
    - `signature`: the signature of the argument that the step keeps (does not donate): the
        model to measure, or the `extra`; `None` without one.
    - `kind`: the kind of input: one batch, or several.
    """

    static: Any
    signature: Signature | None
    kind: StepInput

    @property
    def kept(self) -> Any:
        """The signature of the argument that the step keeps, or of nothing."""
        return self.signature or NOTHING


@dataclass
class Variant:
    """The program of a step for one key.

    - `fn`: a pure function from the arrays of a state, those that are kept, and a batch, to
        new arrays and metrics.
    - `mesh`: the mesh that it runs on.
    - `precision`, `accumulate`: as for [`eqxshard.make_train_step`][].
    - `rule`, `shardings`: the rule of the state, and the sharding of each of its arrays.
    - `jitted`: the jitted function.
    - `batch_sharding`: that of a batch; `None` for any.
    - `is_new`: whether it is still to be linted, and to run for the first time.
    - `memory`: the memory that it needs, once it is known.
    """

    fn: Callable[..., tuple[list[Any], Metrics]]
    mesh: AnyMesh
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
    - `kept`: the arrays of the argument that the step keeps.
    """

    key: Key
    variant: Variant
    state: TrainState | None
    arrays: list[Any]
    kept: list[Any]

    def trace(self, batch: PyTree) -> jax.stages.Traced:
        """Trace the program."""
        shapes = self.key.kind.shapes(batch, self.variant.mesh)
        return self.variant.jitted.trace(self.arrays, self.kept, shapes)

    def lower(self, batch: PyTree) -> jax.stages.Lowered:
        """Lower the program."""
        return lower_for(self.variant.mesh, self.trace(batch))


class InFlight:
    """Holds one result of each call that may not have finished, and bounds their number."""

    def __init__(self):
        self._results: collections.deque[Any] = collections.deque()

    def make_room(self) -> None:
        """Wait for the oldest until there is room for one more.

        This comes before the call that takes its donated inputs, so that an interrupt
        finds them whole.
        """
        while len(self._results) >= IN_FLIGHT:
            try:
                oldest = self._results.popleft()
            except IndexError:
                return  # Another thread was faster.
            # A NumPy array, which a user's own step may return, has no such method.
            wait = getattr(oldest, "block_until_ready", bool)
            wait()

    def add(self, result: Any) -> None:
        """Add a result, for which there is room."""
        self._results.append(result)


class StepMachine:
    """The programs of a step, each made when it is first needed: look up, check, call.

    **Arguments:**

    - `name`: the name of a single step in profiles and compiled modules.
    - `user_fn`: the function that the step is for.
    - `keeps`: the name, in errors, of the argument that the step keeps.
    - `make`: makes the variant for a key, not compiled yet, from the state and the arrays
        that are kept.
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
        # For each key a list, which has its program once that is made. The cache drops the
        # key whose last use is the longest ago.
        self._places = ft.lru_cache(MAX_PROGRAMS)(_place_for)
        self._largest: Memory | None = None
        self._in_flight = InFlight()

    def look_up(self, state: TrainState | None, kept: PyTree, kind: StepInput) -> Call:
        """The program for a state and an argument that is kept; both may be `None`."""
        arrays, static = ([], None) if state is None else flatten_state(state)
        kept, signature = ([], None) if kept is None else Signature.of(kept, self._keeps)
        key = Key(static, signature, kind)
        place = self._places(key)
        if not place:
            variant = self._make(state, kept, key)
            check_devices(kept, variant.mesh, self._keeps)
            if state is not None:
                check_shardings(state, variant.shardings)
            self._jit(variant, key)
            place.append(variant)
        return Call(key, place[0], state, arrays, kept)

    def _jit(self, step: Variant, key: Key) -> None:
        static, signature, kind = key.static, key.kept, key.kind

        def tracing(
            arrays: list[Any], kept: list[Any], batch: PyTree
        ) -> contextlib.AbstractContextManager[None]:
            kind.check(batch, step.mesh, step.accumulate)
            arguments = {
                "batch": batch,
                self._keeps: signature.static.combine(kept),
                f"sharding of {self._keeps}": signature.storage(),
            }
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
        if call.state is not None and call.state._flat is None:
            call = _adopt(call)
        key, variant, state, arrays, kept = call
        try:
            if variant.is_new:
                return self._run_first(call, batch)
            # Refuses negative weights on the host; on devices, a step takes them for nan.
            check_weights(batch)
            place = variant.batch_sharding
            batch = placed(key.kind, batch, variant.mesh, place, variant.accumulate)
            if kept:
                check_not_donated(kept, self._keeps)
            if state is not None:
                arrays = donatable(state, arrays, kept, batch)
            self._in_flight.make_room()
            arrays, metrics = call_jitted(variant.jitted, arrays, kept, batch)
        except Exception as error:
            self._explain(error, call, batch)
            raise
        self._in_flight.add(metrics.weight)
        new = None if state is None else unflatten_state(arrays, key.static, kept)
        return new, metrics

    def _run_first(self, call: Call, batch: PyTree) -> tuple[Any, Metrics]:
        """Lint a program, run it for the first time, and wait for it.

        Most programs that need too much memory fail the first time, and say so here.
        """
        key, variant, _, arrays, kept = call
        check_state_not_donated(arrays)
        check_not_donated(kept, self._keeps)
        check_same(batch, variant.mesh)
        given, place = batch, variant.batch_sharding
        batch = placed(key.kind, batch, variant.mesh, place, variant.accumulate)
        check_weights(fetch_weights(given))
        if {*self._levels.values()} != {"off"}:
            program, findings = self.inspect(call, batch)
            self._measure(call, batch, program)
            self._report(findings)
        # If these arrays could not be made, the step is not to blame.
        with explaining_state(arguments_of(call)):
            jax.block_until_ready((arrays, kept))
        variant.is_new = False
        state, metrics = self.run(call, batch)
        jax.block_until_ready(metrics)
        return state, metrics

    def _explain(self, error: Exception, call: Call, batch: PyTree) -> None:
        """Say why a call failed: for lack of memory, or because of its arguments."""
        key, variant = call.key, call.variant
        if is_out_of_memory(error) and not says_what_it_needs(error):
            memory = variant.memory or self._measure(call, batch)
            error.add_note(memory.describe())
        # (To check these before each call would take as long as the rest of it. Errors of a
        # step that runs are of other types.)
        is_unclear = not isinstance(error, ON_PURPOSE)
        if isinstance(error, TypeError | ValueError) and is_unclear:
            if call.state is not None:
                check_shardings(call.state, variant.shardings)
            check_devices(call.kept, variant.mesh, self._keeps)
            key.kind.check(batch, variant.mesh, variant.accumulate)
        shorten_traceback(error)

    def _measure(self, call: Call, batch: PyTree, program: Program | None = None) -> Memory:
        """Find out how much memory a program needs, and remember the largest."""
        memory = Memory.of(self._named(call.key, batch), call, batch, program)
        call.variant.memory = memory
        if self._largest is None or (memory.peak or 0) > (self._largest.peak or 0):
            self._largest = memory
        return memory

    def describe_memory(self) -> str | None:
        """The memory that the largest program needs, and what to do if it does not fit."""
        return self._largest and self._largest.describe()

    def _named(self, key: Key, batch: PyTree) -> str:
        return f"{key.kind.program(self._name, batch)} of {self._of}"

    def inspect(self, call: Call, batch: PyTree) -> tuple[Program, list[Finding]]:
        """Compile the program; also return what lint finds in it, whatever the level.

        It is compiled for arrays where the program takes them, wherever they are.
        """
        # Imported late: only first calls, and readers of compiled programs, need it.
        from ._lint_step import lint_step

        key, variant, state, arrays, _ = call
        if state is not None:
            arrays = [*map(_abstract, arrays, variant.shardings)]
            call = call._replace(state=unflatten_state(arrays, key.static), arrays=arrays)
        # A call with arguments like them compiles nothing then: JAX keeps the executable.
        traced = call.trace(batch)
        program = Program(traced.jaxpr, traced.lower().compile())
        return program, [*lint_step(call, program, batch)]

    def _report(self, findings: list[Finding]) -> None:
        """Warn of findings, or raise `ValueError`; each is reported once."""
        where = f"the {self._name.replace('_', ' ')} of {self._of}"
        report([x for x in findings if x not in self._reported], self._levels, where)
        self._reported.update(findings)


def _place_for(key: Key) -> list[Variant]:
    """An empty list, for the program of a key."""
    return []


def _adopt(call: Call) -> Call:
    """A call with its state where the program takes it, as if a step had returned it."""
    shardings = call.variant.shardings
    assert call.state is not None
    check_shardings(call.state, shardings)
    arrays = copy_shared(filter_shard(call.arrays, [*shardings]))
    state = unflatten_state(arrays, call.key.static)
    # Marks the state as one that was read: something else may have its arrays.
    state._fields()
    return call._replace(state=state, arrays=arrays)


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
