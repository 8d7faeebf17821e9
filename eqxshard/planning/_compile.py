"""The work of the subprocess: compile a step, and read what it needs."""

import functools
import math
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..compiled._causes import Causes
from ..compiled._hlo import parse_module
from ..inspect._explain import explain
from ..inspect._explanation import Leaf
from ..inspect._lint import Findings
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import batch_sharding, check_batch_size, make_mesh, used_axes
from ..training._init import abstract_state
from ..training._inputs import ONE_BATCH
from ..training._layout import is_offloaded, unused_axes
from ..training._state import TrainState
from ..training._train_step import make_train_step
from ._backends import find_devices
from ._cache import keep_compiled
from ._costs import count_flops
from ._plan import Plan, PlannedMemory
from ._process import Request, describe, load_request
from ._read import (
    describe_collectives,
    find_operations,
    find_unknown,
    make_notes,
    predict_time,
)
from ._schedule import Schedule


def main() -> None:
    """Answer the request in the folder that the command names."""
    folder = Path(sys.argv[1])
    try:
        request = load_request((folder / "request").read_bytes())
        result = _answer(request, folder / "dump")
    except Exception as error:
        result = describe(error)
    part = folder / "part"
    part.write_bytes(pickle.dumps(result))
    os.replace(part, folder / "result")


def _answer(request: Request, dump: Path) -> Plan | int:
    state = make_state(request)
    rows, _ = count_examples(request.batch)
    check_batch_size(rows, mesh_of(state), accumulate=request.options["accumulate"])
    if request.limit is not None and (least := state_bytes(state)) > request.limit:
        return least
    return compile_plan(request, state, dump)


def make_state(request: Request) -> TrainState:
    """The state of a step, as shapes on devices that are not there."""
    sizes: dict[str, Any] = dict(request.mesh_shape)
    count = math.prod(sizes.values())
    devices = find_devices(request.target, request.backend, count)
    return abstract_state(
        request.make_model,
        request.optim,
        key=jax.random.key(0),
        mesh=make_mesh(**sizes, devices=devices),
        rule=request.rule,
        trainable=request.trainable,
        precision=request.precision,
    )


def compile_plan(request: Request, state: TrainState, dump: Path) -> Plan:
    """Compile a step, and read what it needs.

    **Arguments:**

    - `request`: what to compile.
    - `state`: from `make_state`.
    - `dump`: where the compiler for CPUs writes the partitioned text.
    """
    start = time.perf_counter()
    target, backend = request.target, request.backend
    mesh, sizes = mesh_of(state), dict(request.mesh_shape)
    step = make_train_step(request.loss_fn, request.optim, **request.options)
    call = step.machine.look_up(state, None, ONE_BATCH)
    program, findings = step.machine.inspect(call, request.batch)
    seconds = time.perf_counter() - start
    leaves = explain(
        *(state.model, mesh, request.rule),
        optim=request.optim,
        trainable=request.trainable,
    ).leaves
    on_cpu = backend == "cpu"
    module = parse_module(read_dump(dump, mesh.size) if on_cpu else program.text)
    operations = find_operations(module, mesh.size, backend)
    # There is no schedule of the target on a CPU.
    schedule = None if on_cpu else Schedule(module, operations, target)
    flops, unknown = count_flops(module), find_unknown(target, operations)
    least = None if unknown else predict_time(target, flops, operations, sizes, schedule)
    # The first array of a state is the number of the step, and then come the model's.
    arguments = dict(enumerate((path for path, _ in array_leaves(state.model)), start=1))
    gradients = {
        leaf.path: NamedSharding(mesh, leaf.update_spec).shard_shape(leaf.shape)
        for leaf in leaves
        if leaf.update_spec is not None
    }
    causes = Causes(module, sizes, arguments, gradients)
    lower = functools.partial(step.lower, state, request.batch)
    notes = [*make_notes(target, backend, module, unknown)]
    unused = unused_axes(state, mesh, request.rule, lower)
    notes += [said.removesuffix(".") for said in unused]
    if request.cache is not None:
        notes.append(keep_compiled(lower, request.cache))
    rows, tokens = count_examples(request.batch)
    return Plan(
        target=target,
        backend=backend,
        mesh=used_axes(sizes),
        devices=mesh.size,
        memory=plan_memory(request, state, leaves, program.compiled.memory_analysis()),
        flops=flops,
        collectives=tuple(describe_collectives(operations, sizes, causes, schedule)),
        time=least,
        examples=rows,
        tokens=tokens,
        compile_seconds=seconds,
        notes=tuple(notes),
        leaves=leaves,
        timeline=schedule.spans if schedule and least else None,
        settings=_settings(request),
        findings=Findings(findings),
    )


def read_dump(dump: Path, devices: int) -> str:
    """The text of the step right after it was partitioned, which one device's never is."""
    name = "after_spmd-partitioning" if devices > 1 else "before_optimizations"
    files = dump.glob(f"*train_step*{name}*.txt")
    latest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if latest is None:
        raise ValueError(
            "XLA wrote no text of the step, so nothing can be counted; remove --xla_dump "
            "flags from XLA_FLAGS, or use another version of JAX."
        )
    return latest.read_text()


def plan_memory(
    request: Request, state: TrainState, leaves: tuple[Leaf, ...], analysis: Any
) -> PlannedMemory:
    """The memory of one device: exact for what a step keeps, from XLA for the rest.

    **Arguments:**

    - `request`, `state`: what was compiled.
    - `leaves`: the arrays of its model.
    - `analysis`: of the compiled step, by XLA.
    """
    params, optimizer = _bytes(state.model), _bytes(state.opt_state)
    offloaded, total = _offloaded_bytes(state), request.target.memory
    rows = batch_sharding(mesh_of(state))
    batch = jax.tree.leaves(request.batch)
    # The compiler for CPUs does not distinguish memories.
    not_here = offloaded - analysis.host_argument_size_in_bytes
    return PlannedMemory(
        parameters=params,
        optimizer=optimizer - offloaded,
        other_state=_bytes(state) - params - optimizer,
        batch=sum(x.dtype.itemsize * math.prod(rows.shard_shape(x.shape)) for x in batch),
        gradients=sum(leaf.gradient for leaf in leaves),
        temporaries=analysis.temp_size_in_bytes,
        peak=analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
        - not_here,
        device=None if total is None else int(total),
        host=offloaded
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
        + analysis.host_temp_size_in_bytes,
    )


def state_bytes(state: TrainState) -> int:
    """The bytes of one device that a state takes."""
    return _bytes(state) - _offloaded_bytes(state)


def mesh_of(state: TrainState) -> Mesh:
    """The mesh of a state."""
    return state.step.sharding.mesh


def _bytes(tree: PyTree) -> int:
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for _, leaf in array_leaves(tree)
    )


def _offloaded_bytes(state: TrainState) -> int:
    """What is in the host's memory instead."""
    assert state.made_with is not None  # By `abstract_state`.
    rule, leaves = state.made_with.rule, jax.tree.leaves(state.opt_state)
    return _bytes([leaf for leaf in leaves if is_offloaded(leaf, rule)])


def count_examples(batch: Any) -> tuple[int, int | None]:
    """The rows of a batch, and its tokens if an entry has integers in rows."""
    leaves = jax.tree.leaves(batch)
    is_tokens = lambda x: len(x.shape) == 2 and np.issubdtype(x.dtype, np.integer)  # noqa: E731
    tokens = next((math.prod(x.shape) for x in leaves if is_tokens(x)), None)
    return leaves[0].shape[0], tokens


def _settings(request: Request) -> dict[str, str]:
    batch = [f"{path} {format_array(x)}" for path, x in array_leaves(request.batch)]
    settings = {"rule": request.rule, "batch": ", ".join(batch)}
    settings |= {"precision": request.precision, **request.options}
    return {name: str(value) for name, value in settings.items()}
