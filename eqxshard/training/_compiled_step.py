"""A train step for states of one structure: compiled, checked, linted."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from ..compiled._findings import Finding
from ..sharding._leaves import array_leaves
from ..sharding._mesh import format_sharding
from ..transforms._compiles import CompileLog, function_name
from ._compile import Program, jit_on
from ._config import ResolvedConfig, StepConfig
from ._extra import DONATED, Signature, any_donated
from ._gradients import LossInputs
from ._inputs import StepInput, is_elsewhere
from ._layout import fetch_offloaded, make_layout, offload_to_host
from ._lint import argument, lint_model, lint_program
from ._metrics import Metrics
from ._optimizer import check_numbers
from ._state import TrainState, flatten_state, split_model
from ._update import update_state


class CompiledStep:
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
        #: The mesh that it runs on.
        self.mesh = mesh = config.mesh
        #: The sharding of a batch; `None` for any.
        self.batch_sharding = kind.sharding(mesh)
        if extra is not None:
            extra.check_on(mesh, "extra")
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
            program = (
                f"{kind.program('train_step', batch)} of {function_name(config.loss_fn)}"
            )
            arguments = {"state": static.combine(arrays), "batch": batch}
            compile_log.add(program, arguments | {"extra": given[0] if given else None})
            return kind.run(one_step, arrays, batch, mesh)

        # The name in profiles and compiled modules.
        train_step.__name__ += kind.suffix

        whole = NamedSharding(mesh, PartitionSpec())
        #: The compiled function, from arrays and a batch to arrays and metrics.
        self.jitted = jit_on(
            mesh,
            train_step,
            donate_argnums=0,
            in_shardings=(self.shardings, self.batch_sharding, None),
            out_shardings=(self.shardings, whole),
        )

    def compile(self, state: TrainState, batch: PyTree, extra_arrays: list[Any]) -> Program:
        """Compile for a state and a batch."""
        leaves = zip(array_leaves(state), self.shardings, strict=True)
        arrays = [_abstract(leaf, sharding) for (_, leaf), sharding in leaves]
        return self.jitted.compile(arrays, batch, extra_arrays)

    def lint(self, program: Program, state: TrainState, batch: PyTree) -> Iterator[Finding]:
        """Yield all findings in what was compiled for a state and a batch."""
        config, leaves = self._config, array_leaves(state)
        arguments = [
            argument(path, leaf, sharding, donated=True)
            for (path, leaf), sharding in zip(leaves, self.shardings, strict=True)
        ]
        yield from lint_model(state.model, config.mesh, config.rule)
        yield from lint_program(
            program,
            config.mesh,
            state.model,
            arguments,
            self._kind,
            batch,
            precision=config.precision,
            microbatches=config.accumulate,
        )

    def check_shapes(self, batch: PyTree) -> None:
        """Raise `ValueError` unless the rows of a batch divide over the mesh."""
        self._kind.check_shapes(batch, self.mesh, self._config.accumulate)

    def check_inputs(self, state: TrainState, batch: PyTree) -> None:
        """Raise `ValueError` if a state or a batch does not fit this step."""
        self.check_shapes(batch)
        check_shardings(state, self.shardings)
        self._kind.check_placement(batch, self.mesh)


def _abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def check_shardings(state: TrainState, shardings: list[NamedSharding]) -> None:
    """Refuse a donated state, and one that is sharded by another mesh or rule."""
    leaves = array_leaves(state)
    if any_donated(leaf for _, leaf in leaves):
        raise ValueError(DONATED)
    for (path, leaf), wanted in zip(leaves, shardings, strict=True):
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
    check_numbers(state.opt_state)
    scales_loss = config.precision is not None and config.precision.scales_loss
    if scales_loss != (state.loss_scale is not None):
        raise ValueError(
            "only one of this TrainState and this step has a loss scale; make both with "
            "the same precision=."
        )
