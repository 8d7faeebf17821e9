"""The work of the subprocess: compile a step, and read what it needs."""

import functools
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from ..compiled._causes import Causes
from ..compiled._hlo import parse_module
from ..inspect._explain import explain
from ..inspect._explanation import Leaf
from ..inspect._lint import Findings
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import batch_sharding, check_batch_size, make_mesh
from ..training._init import abstract_state
from ..training._inputs import ONE_BATCH
from ..training._state import (
    TrainState,
    is_offloaded,
    repeated_axes,
    unused_axes,
)
from ..training._train_step import make_train_step
from ._backends import find_devices
from ._modules import compile_step
from ._plan import Plan, PlannedMemory
from ._process import Request, StepRequest, describe, load_request
from ._read import count_examples, memory_of, read_dump, read_plan


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


def _answer(request: Request | StepRequest, dump: Path) -> Plan:
    if isinstance(request, StepRequest):
        return compile_step(request, dump)
    state = make_state(request)
    rows = count_examples(request.batch)
    check_batch_size(rows, mesh_of(state), accumulate=request.options["accumulate"])
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
        mesh=make_mesh(**sizes, devices=devices, explicit=request.explicit),
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
    # The first array of a state is the number of the step, and then come the model's.
    paths = (path for path, _ in array_leaves(state.model))
    arguments = {f"arrays[{number}]": path for number, path in enumerate(paths, start=1)}
    gradients = {
        leaf.path: NamedSharding(mesh, leaf.update_spec).shard_shape(leaf.shape)
        for leaf in leaves
        if leaf.update_spec is not None
    }
    lower = functools.partial(step.lower, state, request.batch)
    unused = unused_axes(state, mesh, request.rule, lower)
    notes = [said.removesuffix(".") for said in unused]
    if request.cache is not None:
        notes.append(keep_compiled(lower, request.cache))
    rows = count_examples(request.batch)
    on_cpu = request.backend == "cpu"
    module = parse_module(
        read_dump(dump, mesh.size, "train_step") if on_cpu else program.text
    )
    return read_plan(
        request,
        module,
        sizes,
        Causes(module, sizes, arguments, gradients),
        notes,
        memory=plan_memory(request, state, leaves, program.compiled.memory_analysis()),
        examples=rows,
        compile_seconds=seconds,
        leaves=leaves,
        settings=_settings(request),
        findings=Findings(findings),
        repeated=tuple(repeated_axes(state, mesh, lower)),
    )


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
    offloaded = _offloaded_bytes(state)
    rows = batch_sharding(mesh_of(state))
    batch = jax.tree.leaves(request.batch)
    return memory_of(
        request.target,
        analysis,
        {
            "parameters": params,
            "optimizer state": optimizer - offloaded,
            "other state": _bytes(state) - params - optimizer,
            "batch": sum(
                x.dtype.itemsize * math.prod(rows.shard_shape(x.shape)) for x in batch
            ),
        },
        gradients=sum(leaf.gradient for leaf in leaves),
        offloaded=offloaded,
    )


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


def _settings(request: Request) -> dict[str, str]:
    batch = [f"{path} {format_array(x)}" for path, x in array_leaves(request.batch)]
    settings = {"rule": request.rule, "batch": ", ".join(batch)}
    settings |= {"precision": request.precision, **request.options}
    return {name: str(value) for name, value in settings.items()}


def keep_compiled(lower: Callable[[], jax.stages.Lowered], folder: Path) -> str:
    """Compile a program into the folder of JAX's persistent compilation cache.

    It is compiled again for this, because the plan itself needs what the compiler reports,
    and it reports less about a program that comes out of the cache.

    **Arguments:**

    - `lower`: lowers the program.
    - `folder`: made if it is not there.

    **Returns:**

    A note for the plan.
    """
    # Plans are compiled without the cache, and JAX decides only once whether to use it.
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Otherwise JAX would return the program that it has in memory.
    jax.clear_caches()
    lower().compile()
    kept = sorted(path.name for path in folder.glob("*-cache"))
    return f"the compiled step is in {folder}" if kept else f"nothing is kept in {folder}"
