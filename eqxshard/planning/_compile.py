"""What runs in the process that compiles: the step is compiled, and read."""

import functools
import math
import os
import pickle
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from ..compiled._causes import Causes, Leaf
from ..compiled._collective import Collective
from ..compiled._communication import Operation, find_collectives
from ..compiled._hlo import Module, parse_module
from ..inspect._lint import Findings
from ..sharding._leaves import array_leaves, format_array
from ..sharding._mesh import batch_sharding, make_mesh
from ..training._init import abstract_state
from ..training._inputs import ONE_BATCH
from ..training._state import TrainState
from ..training._train_step import make_train_step
from ..training._unused_axes import unused_axes
from ._cache import keep_compiled
from ._costs import Costs
from ._failure import Failure
from ._leaves import mesh_of, on_host, plan_leaves, shard_bytes, stored_gradients
from ._links import link_seconds
from ._plan import Plan, PlannedMemory, PlannedTime
from ._request import Request, load_request
from ._rewrites import rewrite_collectives
from ._schedule import Elapsed, Schedule, compute_seconds
from ._targets import TPU_HOST, Target


def main() -> None:
    """Compile the request in the folder that the command names, and write the plan."""
    answer(lambda request, dump: compile_plan(request, make_state(request), dump))


def answer(work: Callable[[Any, Path], Any]) -> None:
    """Do the work that the folder that the command names asks for; write the result."""
    folder = Path(sys.argv[1])
    try:
        request = load_request((folder / "request").read_bytes())
        result = work(request, folder / "dump")
    except Exception as error:
        result = Failure.of(error)
    part = folder / "part"
    part.write_bytes(pickle.dumps(result))
    os.replace(part, folder / "result")


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
    schedule = Schedule(module, operations, request.target)
    elapsed = schedule.elapsed(module.entry)
    flops = count_flops(module)
    gradients = stored_gradients(state)
    causes = Causes(module, sizes, _model_arrays(state), gradients)
    rows, tokens = count_examples(request.batch)
    predicted = _time(request, flops, operations, sizes, elapsed)
    analysis = program.compiled.memory_analysis()
    notes = list(_notes(request, module))
    unknown = _unknown(operations, request.target)
    if request.target.flops and unknown:
        notes.append(f"no time is predicted, because the {unknown} is not known")
    lower = functools.partial(step.lower, state, request.batch)
    unused = unused_axes(state, mesh, request.rule, lower)
    notes += [text.removesuffix(".") for text in unused]
    if request.cache is not None:
        notes.append(keep_compiled(lower, Path(request.cache)))
    return Plan(
        target=request.target,
        backend=request.backend,
        mesh={axis: size for axis, size in sizes.items() if size > 1} or {"data": 1},
        devices=mesh.size,
        memory=_memory(request, state, gradients, analysis),
        flops=flops,
        collectives=tuple(
            _describe(each, sizes, causes, None if on_cpu else elapsed)
            for each in operations
        ),
        time=predicted,
        examples=rows,
        tokens=tokens,
        compile_seconds=seconds,
        notes=tuple(notes),
        leaves=plan_leaves(state, gradients),
        timeline=None if on_cpu or predicted is None else elapsed.timeline.spans,
        settings=_settings(request),
        findings=Findings(findings),
    )


def has_peers(operation: Operation) -> bool:
    """Whether devices take part together, and not each alone."""
    return operation.groups is None or operation.groups.shape[1] > 1


def find_devices(request: Request) -> list[Any]:
    """The devices to compile for, which are not there."""
    count, target = request.devices, request.target
    if request.backend == "cpu":
        return jax.devices()[:count]
    if request.backend == "gpu":
        each = min(count, target.per_host)
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.config,
            topology=f"1x{count // each}x{each}",
        )
        return list(topology.devices)
    topology = topologies.get_topology_desc(platform="tpu", **tpu_topology(target, count))
    return list(topology.devices)


def tpu_topology(target: Target, count: int) -> dict[str, Any]:
    """What libtpu calls so many chips: in two dims, or three, as near to a cube."""
    slices = max(count // target.per_host, 1)
    chips, options = count // slices, dict[str, Any]()
    dims = 2 if target.config in ("v5e", "v6e") else 3
    # Hosts have four chips, two by two. Fewer are a part of one.
    shape = [2, 2, 1][:dims] if chips >= TPU_HOST else [chips, 1, 1][:dims]
    if chips < TPU_HOST:
        options["chips_per_host_bounds"] = (chips, 1, 1)
    for factor in _prime_factors(chips // TPU_HOST):
        shape[int(np.argmin(shape))] *= factor
    if slices > 1:
        options["num_slices"] = slices
    if target.config == "v4":  # Or else its chips count as two devices each.
        options["chip_config_name"] = "megacore"
    return {"topology_name": f"{target.config}:{'x'.join(map(str, shape))}", **options}


def _prime_factors(n: int) -> list[int]:
    found, factor = [], 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found[::-1]


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


def _memory(
    request: Request,
    state: TrainState,
    gradients: list[Leaf],
    analysis: Any,
) -> PlannedMemory:
    """What one device needs."""
    elsewhere = on_host(state)
    params = _bytes_of(state.model, elsewhere)
    opt_state = _bytes_of(state.opt_state, elsewhere)
    rows = batch_sharding(mesh_of(state))
    total = request.target.memory
    offloaded = sum(shard_bytes(x) for _, x in array_leaves(state) if id(x) in elsewhere)
    # The compiler for CPUs tells no memories apart.
    not_here = offloaded - analysis.host_argument_size_in_bytes
    return PlannedMemory(
        parameters=params,
        optimizer=opt_state,
        other_state=_bytes_of(state, elsewhere) - params - opt_state,
        batch=sum(shard_bytes(x, rows) for x in jax.tree.leaves(request.batch)),
        gradients=sum(leaf.bytes for leaf in gradients),
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


def _bytes_of(tree: Any, elsewhere: set[int]) -> int:
    """On a device."""
    leaves = [leaf for _, leaf in array_leaves(tree)]
    return sum(shard_bytes(leaf) for leaf in leaves if id(leaf) not in elsewhere)


def _model_arrays(state: TrainState) -> dict[int, str]:
    """The paths of the model's arrays, by their numbers among the step's arguments."""
    # The first array of a state is the number of the step.
    return dict(enumerate((path for path, _ in array_leaves(state.model)), start=1))


def count_flops(module: Module) -> dict[str, float]:
    """The operations of one step on one device, by dtype.

    Of the branches of a condition, those of the one that has the most.
    """
    costs = Costs(module)

    @functools.cache
    def inside(computation: str) -> Counter[str]:
        total = Counter[str]()
        for instruction in module.computations.get(computation, ()):
            total.update(costs.flops(instruction))
            if instruction.opcode in ("fusion", "custom-call"):  # All of it was counted.
                continue
            parts = [inside(name) for _, name in instruction.called()]
            if instruction.opcode == "conditional":
                parts = [max(parts, key=Counter.total, default=Counter())]
            times = module.trips(instruction)
            for part in parts:
                for dtype, count in part.items():
                    total[dtype] += count * (1 if times is None else times)
        return total

    counts = inside(module.entry)
    return {dtype: float(count) for dtype, count in counts.items() if count}


def _describe(
    operation: Operation,
    sizes: dict[str, int],
    causes: Causes,
    elapsed: Elapsed | None,
) -> Collective:
    key = operation.start.computation, operation.start.name
    sending = 0.0 if elapsed is None else elapsed.sending[key]
    hidden = None
    if elapsed is not None and sending:
        hidden = min(max(1 - elapsed.waiting[key] / sending, 0.0), 1.0)
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
        key = operation.start.computation, operation.start.name
        name = ",".join(operation.axes(sizes) or ("unknown",))
        links[name] += elapsed.sending[key]
        waiting[name] += elapsed.waiting[key]
    compute = compute_seconds(flops, target)
    if request.backend == "cpu":
        # There is no schedule of the target: at best, all is hidden behind the longest.
        return PlannedTime(
            step=max(compute, sum(links.values())),
            compute=compute,
            memory=None,
            links=dict(links),
            waiting=None,
        )
    return PlannedTime(
        step=elapsed.seconds,
        compute=elapsed.compute,
        memory=elapsed.memory,
        links=dict(links),
        waiting=dict(waiting),
    )


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


def _notes(request: Request, module: Module) -> list[str]:
    notes = []
    if request.target.compiler == "cpu":
        notes.append("simulated devices share the memory of one process")
        if any(x.opcode == "convolution" for x in module.instructions()):
            notes.append(
                "the peak is too low, as XLA does not count what convolutions on CPUs copy"
            )
    elif request.backend == "cpu":
        notes.append(
            "compiled for CPUs: temporaries are an upper estimate, and no schedule says "
            f"what communication is hidden. The backend {request.target.compiler} knows "
            "both (--backend, or backend=), and says how to install it"
        )
    if request.backend == "gpu":
        notes.append(
            "memory is without CUDA's context, NCCL's buffers and cuDNN's workspaces, "
            "about 2 GB"
        )
    loops = [x for x in module.instructions() if x.opcode == "while"]
    if any(module.trips(loop) is None for loop in loops):
        notes.append("a loop of unknown length counts as one iteration")
    kernels = [
        x
        for x in module.instructions()
        if x.opcode == "custom-call"
        and any(
            word in x.attributes
            for word in ("mosaic", "__gpu$xla.gpu.triton", "tpu_custom")
        )
    ]
    if kernels:
        notes.append("the arithmetic of custom kernels is not counted")
    return notes
