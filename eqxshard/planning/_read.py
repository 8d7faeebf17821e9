"""Read a plan from a compiled program: its collectives, memory, arithmetic and time."""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from .._errors import UsageError
from ..compiled._causes import Causes, user_frame
from ..compiled._communication import (
    Collective,
    Operation,
    find_collectives,
    join_axes,
)
from ..compiled._hlo import VIEWS, Instruction, Module, Shape
from ..compiled._lowered import Input
from ..inspect._explanation import Leaf
from ..sharding._mesh import used_axes
from ..sharding._text import comma_list
from ._backends import install
from ._costs import Costs, count_flops
from ._links import link_seconds
from ._plan import Plan, PlannedMemory, PlannedTime
from ._targets import Compiler, Target
from ._timeline import Timeline, compute_seconds, read_work

#: Words by which custom kernels are recognised in the text of a module.
_KERNELS = ("mosaic", "__gpu$xla.gpu.triton", "tpu_custom")

#: The seconds of a step below which the start of kernels counts, a few microseconds each.
_SHORT = 1e-4


def find_operations(module: Module, devices: int, compiler: Compiler) -> list[Operation]:
    """The collectives of several devices, without those that each device does alone.

    XLA's compiler for CPUs has no reduce-scatters, and widens bfloat16 before it sends it.
    So its text is that of the partitioner, which is the same on all platforms. An
    all-reduce there counts as a reduce-scatter, as of other compilers, where each device
    keeps only its part of the sum.

    **Arguments:**

    - `module`: the compiled step.
    - `devices`: the number of devices.
    - `compiler`: the compiler that the text is from.
    """
    found = find_collectives(module, devices)
    together = [x for x in found if x.groups is None or x.groups.shape[1] > 1]
    return [_scattered(x, module) for x in together] if compiler == "cpu" else together


def _scattered(operation: Operation, module: Module) -> Operation:
    """An all-reduce as a reduce-scatter, if each device keeps only its part of the sum."""
    if operation.kind != "all-reduce" or operation.groups is None:
        return operation
    whole, devices = operation.shapes[0], operation.groups.shape[1]
    parts = {
        Shape(whole.dtype, use.shapes[0].dims)
        if use.opcode == "dynamic-slice" and len(operation.shapes) == 1
        else whole
        for use in _uses(operation.start, module)
    }
    part = parts.pop() if len(parts) == 1 else whole
    if devices * part.bytes != whole.bytes:
        return operation
    return dataclasses.replace(operation, kind="reduce-scatter", shapes=(part,))


def _uses(value: Instruction, module: Module) -> Iterator[Instruction]:
    """The users of a value, and of its views."""
    for user in module.takers(value):
        if user.opcode in VIEWS:
            yield from _uses(user, module)
        else:
            yield user


def describe_collectives(
    operations: Sequence[Operation],
    sizes: Mapping[str, int],
    causes: Causes,
    schedule: Timeline | None,
) -> Iterator[Collective]:
    """The collectives of a plan, with the line and the arrays that cause each.

    **Arguments:**

    - `operations`: from `find_operations`.
    - `sizes`: the sizes of the axes of the mesh.
    - `causes`: those of the same module.
    - `schedule`: the timeline of these operations, if the compiler is that of the target.
    """
    for number, operation in enumerate(operations):
        hidden = None
        if schedule is not None and (sending := schedule.seconds("collective", number)):
            hidden = min(max(1 - schedule.seconds("waiting", number) / sending, 0.0), 1.0)
        frame = causes.frame(operation)
        if frame is None and operation.kind == "all-gather":
            # The compiler may not say where a gather of an argument is from.
            frame = causes.frame(operation, of_use=True)
        yield operation.describe(
            sizes,
            line=frame and frame.place,
            function=(frame and frame.function) or None,
            leaves=causes.leaves(operation),
            hidden=hidden,
        )


def predict_time(
    target: Target,
    flops: Mapping[str, float],
    operations: Sequence[Operation],
    sizes: Mapping[str, int],
    schedule: Timeline | None,
    about: Timeline | None = None,
) -> PlannedTime:
    """The time of a step on a target for which `find_unknown` finds nothing missing.

    **Arguments:**

    - `target`: the devices.
    - `flops`: by dtype, the operations of a device.
    - `operations`: the collectives.
    - `sizes`: the sizes of the axes of the mesh.
    - `schedule`: the timeline at the peaks of the target. Without one, the time is that of
        the longer of arithmetic and communication, as if the other were hidden behind it.
    - `about`: the timeline at the efficiency of the target.
    """
    links = defaultdict[str, float](float)
    if schedule is None:
        for each in operations:
            seconds = (link_seconds(each, target) or 0.0) * (each.times or 1)
            links[join_axes(each.axes(sizes) or None)] += seconds
        compute = compute_seconds(flops, target)
        longest = max(compute, sum(links.values()))
        return PlannedTime(longest, compute, None, dict(links), None)
    waiting = defaultdict[str, float](float)
    for number, operation in enumerate(operations):
        axes = join_axes(operation.axes(sizes) or None)
        links[axes] += schedule.seconds("collective", number)
        waiting[axes] += schedule.seconds("waiting", number)
    return PlannedTime(
        step=schedule.length,
        compute=schedule.seconds("compute"),
        memory=schedule.seconds("memory"),
        links=dict(links),
        waiting=dict(waiting),
        about=about and predict_time(target, flops, operations, sizes, about),
    )


def find_unknown(target: Target, operations: Sequence[Operation]) -> str:
    """The name of what is missing to predict the time of a step; empty if nothing is."""
    if target.bandwidth is None or not target.flops:
        return "speed of the target" if target.bandwidth else "bandwidth"
    missing = [each for each in operations if link_seconds(each, target) is None]
    if not missing:
        return ""
    if any(each.groups is None for each in missing):
        return "grouping of devices that communicate"
    return "link" if target.link is None else "network"


def make_notes(
    target: Target,
    compiler: Compiler,
    module: Module,
    unknown: str,
    least: PlannedTime | None,
) -> Iterator[str]:
    """The notes of a plan on its compiler, its text and its time.

    **Arguments:**

    - `target`, `compiler`, `module`: as for `read_plan`.
    - `unknown`: from `find_unknown`.
    - `least`: from `predict_time`.
    """
    instructions = [*module.instructions()]
    if target.compiler == "cpu":
        yield "simulated devices share the memory of one process"
    elif compiler == "cpu":
        yield (
            "compiled for CPUs: temporaries are an upper estimate, and no schedule says "
            f"what communication is hidden. The compiler for {target.compiler.upper()}s "
            "knows both; if it is not installed, run "
            f"`{install(target.compiler)}` (on Linux)"
        )
    if compiler == "gpu":
        yield (
            "memory is without CUDA's context, NCCL's buffers and cuDNN's workspaces, "
            "about 2 GB"
        )
    loops = [each for each in instructions if module.trips(each) is None]
    if loops:
        frames = [user_frame(module.stack(each)) for each in loops]
        places = comma_list(dict.fromkeys(frame.place for frame in frames if frame))
        yield (
            f"a loop of unknown length{places and f' ({places})'} counts as one iteration, "
            "so its arithmetic and time may be more than planned"
        )
    calls = [each.attributes for each in instructions if each.opcode == "custom-call"]
    if any(word in attributes for attributes in calls for word in _KERNELS):
        yield "the arithmetic of custom kernels is not counted"
    if unknown:
        yield f"no time is predicted, because the {unknown} is not known"
    if least is not None and 0 < least.step < _SHORT:
        yield (
            "the least time leaves out what kernels and messages take to start, some "
            "microseconds each, so a step as short as this takes several times as long"
        )


def read_dump(dump: Path, devices: int, step: str) -> str:
    """The text of a step right after it was partitioned.

    (A step for one device is not partitioned: its text is that before optimizations.)

    **Arguments:**

    - `dump`: the folder that XLA wrote to.
    - `devices`: the number of devices.
    - `step`: the name of the step.

    **Raises:**

    `ValueError` if there is no such text.
    """
    name = "after_spmd-partitioning" if devices > 1 else "before_optimizations"
    files = dump.glob(f"*{step}*{name}*.txt")
    latest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    if latest is None:
        raise UsageError(
            "XLA wrote no text of the step, so nothing can be counted; remove --xla_dump "
            "flags from XLA_FLAGS, or use another version of JAX."
        )
    return latest.read_text()


class Known(NamedTuple):
    """The arrays that a step takes, and their bytes on one device.

    - `arguments`: the bytes of the arguments, by name.
    - `gradients`: the bytes of all gradients at once; `None` if they are not known.
    - `offloaded`: the bytes of the arguments that are in the host's memory.
    - `leaves`: the arrays.
    """

    arguments: Mapping[str, int]
    gradients: int | None
    offloaded: int
    leaves: tuple[Leaf, ...]


def read_inputs(inputs: Sequence[Input], module: Module, analysis: Any) -> Known:
    """The arrays that a function takes, with the size of each part by the compiled text.

    **Arguments:**

    - `inputs`: the arrays of the lowered function.
    - `module`: its compiled text.
    - `analysis`: XLA's analysis of its memory.
    """
    parts = {
        int(x.content): sum(shape.bytes for shape in x.shapes)
        for x in module.computations[module.entry]
        if x.opcode == "parameter"
    }
    leaves = tuple(
        Leaf(
            path=each.name,
            shape=each.shape,
            dtype=each.dtype,
            spec=PartitionSpec() if each.spec is None else each.spec,
            bytes_whole=each.bytes,
            bytes_per_device=parts[each.number],
        )
        for each in inputs
    )
    arguments = Counter[str]()
    for each, leaf in zip(inputs, leaves, strict=True):
        arguments[each.argument] += leaf.bytes_per_device
    return Known(dict(arguments), None, analysis.host_argument_size_in_bytes, leaves)


def memory_of(target: Target, analysis: Any, known: Known) -> PlannedMemory:
    """The memory of one device and of its host, by XLA's analysis and the known arrays."""
    # The compiler for CPUs does not distinguish memories.
    not_here = known.offloaded - analysis.host_argument_size_in_bytes
    return PlannedMemory(
        arguments=known.arguments,
        gradients=known.gradients,
        temporaries=analysis.temp_size_in_bytes,
        peak=analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
        - not_here,
        device=None if target.memory is None else int(target.memory),
        host=known.offloaded
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
        + analysis.host_temp_size_in_bytes,
    )


def read_plan(
    target: Target,
    backend: Compiler,
    devices: int,
    module: Module,
    sizes: Mapping[str, int],
    causes: Causes,
    notes: Sequence[str],
    **others: Any,
) -> Plan:
    """The plan of a compiled step.

    **Arguments:**

    - `target`, `devices`, `backend`: the kind and the number of the devices that it was
        compiled for, and the compiler.
    - `module`: its text.
    - `sizes`: the sizes of the axes of the mesh.
    - `causes`: those of the same text.
    - `notes`: more notes of the plan.
    - `others`: the other fields of the plan.
    """
    operations = find_operations(module, devices, backend)
    # The compiler for CPUs makes no schedule of another target.
    schedule = about = None
    if backend != "cpu":
        work = functools.cache(functools.partial(read_work, Costs(module), target))
        schedule = Timeline(module, operations, target, work=work)
        if target.efficiency is not None:
            about = Timeline(module, operations, target, target.efficiency, work)
    flops, unknown = count_flops(module), find_unknown(target, operations)
    least = None
    if not unknown:
        least = predict_time(target, flops, operations, sizes, schedule, about)
    return Plan(
        target=target,
        backend=backend,
        mesh=used_axes(sizes),
        devices=devices,
        flops=flops,
        model_flops=count_flops(module, again=False),
        collectives=tuple(describe_collectives(operations, sizes, causes, schedule)),
        time=least,
        notes=(*make_notes(target, backend, module, unknown, least), *notes),
        timeline=schedule.spans if schedule and least else None,
        **others,
    )
