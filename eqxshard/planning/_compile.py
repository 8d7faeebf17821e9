"""The work of the subprocess: compile a step, and read what it needs."""

import functools
import math
import os
import pickle
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..compiled._causes import Causes
from ..compiled._collective import Collective, join_axes
from ..compiled._communication import Operation, find_collectives
from ..compiled._hlo import Module, parse_module
from ..inspect._explain import explain
from ..inspect._lint import Findings
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import check_batch_size, make_mesh, used_axes
from ..training._init import abstract_state
from ..training._inputs import ONE_BATCH
from ..training._state import TrainState
from ..training._train_step import make_train_step
from ..training._unused_axes import unused_axes
from ._cache import keep_compiled
from ._costs import count_flops
from ._devices import find_devices
from ._memory import least_bytes, mesh_of, plan_memory, stored_gradients
from ._plan import Plan, PlannedTime
from ._process import Failure, TooLarge
from ._request import Request, load_request
from ._rewrites import rewrite_collectives
from ._schedule import Elapsed, Schedule, compute_seconds, key_of, link_seconds
from ._targets import Target

#: Custom kernels are recognised by these words in the text of a module.
_KERNELS = ("mosaic", "__gpu$xla.gpu.triton", "tpu_custom")


def main() -> None:
    """Answer the request in the folder that the command names."""
    folder = Path(sys.argv[1])
    try:
        request = load_request((folder / "request").read_bytes())
        result = _answer(request, folder / "dump")
    except Exception as error:
        result = Failure.of(error)
    part = folder / "part"
    part.write_bytes(pickle.dumps(result))
    os.replace(part, folder / "result")


def _answer(request: Request, dump: Path) -> Plan | TooLarge:
    state = make_state(request)
    rows, _ = count_examples(request.batch)
    check_batch_size(rows, mesh_of(state), accumulate=request.options["accumulate"])
    if request.limit is not None and (least := least_bytes(request, state)) > request.limit:
        return TooLarge(least)
    return compile_plan(request, state, dump)


def make_state(request: Request) -> TrainState:
    """The state of a step, as shapes on devices that are not there."""
    sizes: dict[str, Any] = dict(request.mesh_shape)
    return abstract_state(
        request.make_model,
        request.optim,
        key=jax.random.key(0),
        mesh=make_mesh(**sizes, devices=find_devices(request)),
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
    on_cpu = request.backend == "cpu"
    text = read_dump(dump, mesh.size) if on_cpu else program.text
    module = parse_module(text)
    operations = [x for x in find_collectives(module, mesh.size) if has_peers(x)]
    if on_cpu:
        operations = rewrite_collectives(module, operations)
    elapsed = Schedule(module, operations, request.target).elapsed(module.entry)
    # There is no schedule of the target on a CPU.
    schedule = None if on_cpu else elapsed
    flops = count_flops(module)
    predicted = _time(request, flops, operations, sizes, elapsed)
    gradients = stored_gradients(state)
    causes = Causes(module, sizes, _model_arrays(state), gradients)
    lower = functools.partial(step.lower, state, request.batch)
    rows, tokens = count_examples(request.batch)
    explained = explain(
        *(state.model, mesh, request.rule),
        optim=request.optim,
        trainable=request.trainable,
    )
    notes = _notes(request, module, operations)
    notes += [x.removesuffix(".") for x in unused_axes(state, mesh, request.rule, lower)]
    if request.cache is not None:
        notes.append(keep_compiled(lower, Path(request.cache)))
    return Plan(
        target=request.target,
        backend=request.backend,
        mesh=used_axes(sizes),
        devices=mesh.size,
        memory=plan_memory(request, state, gradients, program.compiled.memory_analysis()),
        flops=flops,
        collectives=tuple(_describe(x, sizes, causes, schedule) for x in operations),
        time=predicted,
        examples=rows,
        tokens=tokens,
        compile_seconds=seconds,
        notes=tuple(notes),
        leaves=explained.leaves,
        timeline=None if on_cpu or predicted is None else elapsed.timeline.spans,
        settings=_settings(request),
        findings=Findings(findings),
    )


def has_peers(operation: Operation) -> bool:
    """Whether devices take part together, and not each alone."""
    return operation.groups is None or operation.groups.shape[1] > 1


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


def _model_arrays(state: TrainState) -> dict[int, str]:
    """The paths of the model's arrays, by their numbers among the step's arguments."""
    # The first array of a state is the number of the step.
    return dict(enumerate((path for path, _ in array_leaves(state.model)), start=1))


def _describe(
    operation: Operation,
    sizes: dict[str, int],
    causes: Causes,
    schedule: Elapsed | None,
) -> Collective:
    hidden = None
    if schedule is not None and (sending := schedule.sending[key_of(operation)]):
        waiting = schedule.waiting[key_of(operation)]
        hidden = min(max(1 - waiting / sending, 0.0), 1.0)
    return Collective(
        kind=operation.kind,
        axes=operation.axes(sizes),
        shapes=tuple(map(str, operation.shapes)),
        bytes=operation.bytes,
        sent=operation.sent,
        times=operation.times,
        in_loop=operation.in_loop,
        line=causes.line(operation),
        function=causes.function(operation),
        leaves=causes.leaves(operation),
        hidden=hidden,
    )


def _time(
    request: Request,
    flops: dict[str, float],
    operations: list[Operation],
    sizes: dict[str, int],
    elapsed: Elapsed,
) -> PlannedTime | None:
    target = request.target
    if not target.flops or _unknown(operations, target):
        return None
    links, waiting = defaultdict[str, float](float), defaultdict[str, float](float)
    for operation in operations:
        axes = join_axes(operation.axes(sizes) or None)
        links[axes] += elapsed.sending[key_of(operation)]
        waiting[axes] += elapsed.waiting[key_of(operation)]
    if request.backend != "cpu":
        parts = (elapsed.compute, elapsed.memory, dict(links), dict(waiting))
        return PlannedTime(elapsed.seconds, *parts)
    # There is no schedule of the target: at best, all is hidden behind the longest.
    compute = compute_seconds(flops, target)
    return PlannedTime(max(compute, sum(links.values())), compute, None, dict(links), None)


def _unknown(operations: list[Operation], target: Target) -> str:
    """What has to be known to predict the time of a step, and is not."""
    if target.bandwidth is None:
        return "bandwidth"
    missing = [each for each in operations if link_seconds(each, target) is None]
    if not missing:
        return ""
    if any(each.groups is None for each in missing):
        return "groups of devices that communicate"
    return "link" if target.link is None else "network"


def count_examples(batch: Any) -> tuple[int, int | None]:
    """The rows of a batch, and its tokens if an entry has integers in rows."""
    leaves = jax.tree.leaves(batch)
    is_tokens = lambda x: len(x.shape) == 2 and np.issubdtype(x.dtype, np.integer)  # noqa: E731
    tokens = next((math.prod(x.shape) for x in leaves if is_tokens(x)), None)
    return leaves[0].shape[0], tokens


def _settings(request: Request) -> dict[str, str]:
    batch = [f"{path} {format_array(x)}" for path, x in array_leaves(request.batch)]
    settings = {"rule": repr(request.rule), "batch": ", ".join(batch)}
    if (precision := request.precision) is not None:
        names = {"compute": precision.compute, "parameters": precision.params}
        settings["precision"] = ", ".join(
            f"{name} {jnp.dtype(x)}" for name, x in names.items() if x is not None
        )
    return settings | {name: str(value) for name, value in request.options.items()}


def _notes(request: Request, module: Module, operations: list[Operation]) -> list[str]:
    notes, target = [], request.target
    opcodes = {x.opcode for x in module.instructions()}
    if target.compiler == "cpu":
        notes.append("simulated devices share the memory of one process")
        if "convolution" in opcodes:
            notes.append(
                "the peak is too low, as XLA does not count what convolutions on CPUs copy"
            )
    elif request.backend == "cpu":
        notes.append(
            "compiled for CPUs: temporaries are an upper estimate, and no schedule says "
            f"what communication is hidden. The backend {target.compiler} knows both "
            "(--backend, or backend=), and says how to install it"
        )
    if request.backend == "gpu":
        notes.append(
            "memory is without CUDA's context, NCCL's buffers and cuDNN's workspaces, "
            "about 2 GB"
        )
    loops = [x for x in module.instructions() if x.opcode == "while"]
    if any(module.trips(loop) is None for loop in loops):
        notes.append("a loop of unknown length counts as one iteration")
    calls = [x.attributes for x in module.instructions() if x.opcode == "custom-call"]
    if any(word in attributes for attributes in calls for word in _KERNELS):
        notes.append("the arithmetic of custom kernels is not counted")
    if target.flops and (unknown := _unknown(operations, target)):
        notes.append(f"no time is predicted, because the {unknown} is not known")
    return notes
