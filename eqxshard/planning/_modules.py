"""Compile a function that was lowered elsewhere, for other devices; and read it."""

import io
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jax import get_compile_options, ir, make_ir_context
from ..compiled._causes import Causes
from ..compiled._hlo import Module, parse_module
from ..compiled._lowered import LoweredStep, find_main
from ..inspect._explanation import Leaf
from ..inspect._functions import lint_lowered
from ..inspect._lint import Findings
from ..sharding._text import first_few
from ._backends import find_devices
from ._plan import Plan
from ._process import StepRequest
from ._read import count_examples, memory_of, read_dump, read_plan

#: What a function is called where it is compiled, whatever its name.
_PLANNED = "planned_step"


class CompiledModule(NamedTuple):
    """What XLA made of a module: its text, and its analysis of the memory."""

    text: str
    analysis: Any


def dump_module(lowered: jax.stages.Lowered) -> bytes:
    """A lowered function for another process with the same JAX."""
    module: Any = lowered.compiler_ir("stablehlo")
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


def compile_module(data: bytes, name: str, devices: Sequence[Any]) -> CompiledModule:
    """Compile for devices of any kind, as JAX compiles a function that it has lowered.

    **Arguments:**

    - `data`: from `dump_module`.
    - `name`: what to call the module.
    - `devices`: as many as it was lowered for.
    """
    client = devices[0].client
    ids = np.array([device.id for device in devices])
    options = get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=ids.reshape(1, -1),
        backend=client,
    )
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    with make_ir_context():
        module = ir.Module.parse(data)
        attributes = module.operation.attributes
        attributes["sym_name"] = ir.StringAttr.get(name)
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(devices))
        attributes["mhlo.num_partitions"] = count
        main = find_main(module)
        # JAX leaves to XLA how to split what has no sharding.
        build = options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = _left_open(main.arg_attrs)
        build.allow_spmd_sharding_propagation_to_output = _left_open(main.result_attrs)
        # CPUs are there, so what is compiled for them is loaded, too.
        is_there = devices[0].platform == "cpu"
        executable = (client.compile_and_load if is_there else client.compile)(
            module,
            executable_devices=sharding._internal_device_list,
            compile_options=options,
        )
    text = "\n\n".join(each.to_string() for each in executable.hlo_modules())
    return CompiledModule(text, executable.get_compiled_memory_stats())


def _left_open(attributes: Any) -> list[bool]:
    return ["sdy.sharding" not in each for each in attributes]


def compile_step(request: StepRequest, dump: Path) -> Plan:
    """Compile a function that was lowered elsewhere, and read what it needs."""
    start = time.perf_counter()
    step, sizes = request.step, request.step.sizes
    devices = find_devices(request.target, request.backend, step.devices)
    text, analysis = compile_module(request.module, _PLANNED, devices)
    seconds = time.perf_counter() - start
    module = parse_module(text)
    findings, notes = [*request.findings], [*request.notes]
    with warnings.catch_warnings(record=True) as said:
        findings += lint_lowered(step, module, request.scanned)
    notes += [str(each.message).removesuffix(".") for each in said]
    leaves = tuple(_input_leaves(step, module))
    notes += _whole(step, leaves)
    arguments = Counter[str]()
    for each, leaf in zip(step.inputs, leaves, strict=True):
        arguments[each.argument] += leaf.bytes_per_device
    examples = None
    if step.batch:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in step.batch]
        examples = count_examples(shapes)
    if request.backend == "cpu":
        module = parse_module(read_dump(dump, step.devices, _PLANNED))
    paths = {each.name: each.name for each in step.inputs}
    return read_plan(
        request,
        module,
        sizes,
        Causes(module, sizes, paths, {}, step.batch_axes),
        notes,
        memory=memory_of(
            request.target,
            analysis,
            dict(arguments),
            gradients=None,
            offloaded=analysis.host_argument_size_in_bytes,
        ),
        examples=examples,
        compile_seconds=seconds,
        leaves=leaves,
        settings={"function": step.name, "arguments": ", ".join(arguments)},
        findings=Findings(findings),
        repeated=request.repeated,
    )


def _whole(step: LoweredStep, leaves: Sequence[Leaf]) -> Iterator[str]:
    """A note on arrays that nobody split, and that are whole on each of several devices."""
    names = [
        leaf.path
        for each, leaf in zip(step.inputs, leaves, strict=True)
        # Few numbers, such as those of a random key, are meant to be whole.
        if each.spec is None and math.prod(each.shape) > 2 * step.devices
        if leaf.bytes_per_device == leaf.bytes_whole
    ]
    if names and step.devices > 1:
        rest = "is whole on each device; give it a sharding"
        if len(names) > 1:
            rest = "are whole on each device; give them shardings"
        yield f"{first_few(names)} {rest}"


def _input_leaves(step: LoweredStep, module: Module) -> Iterator[Leaf]:
    """The arrays that a function takes; the compiled text says how large each part is."""
    parts = {
        int(x.content): sum(shape.bytes for shape in x.shapes)
        for x in module.computations[module.entry]
        if x.opcode == "parameter"
    }
    for each in step.inputs:
        yield Leaf(
            path=each.name,
            shape=each.shape,
            dtype=each.dtype,
            spec=PartitionSpec() if each.spec is None else each.spec,
            bytes_whole=each.bytes,
            bytes_per_device=parts[each.number],
        )
