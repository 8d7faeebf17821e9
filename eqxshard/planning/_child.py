"""Compile a step in a process of its own: the request, the work, and its errors.

It is a separate process because it may need another platform than this one has started,
because an error in XLA's C++ ends the process, and so that its memory is given back. It
gets a step that is lowered already, as StableHLO, and nothing of the user's code.
"""

import dataclasses
import io
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .._errors import ON_PURPOSE
from .._jax import get_compile_options, ir, make_ir_context
from ..compiled._causes import Causes
from ..compiled._findings import Finding
from ..compiled._hlo import parse_module
from ..compiled._lint_text import LintedStep
from ..compiled._lowered import Input, find_main
from ..inspect._explanation import Leaf
from ..inspect._functions import lint_compiled
from ..inspect._lint import Findings
from ..sharding._text import first_few
from ..training._advice import shorten_traceback
from ._backends import find_devices, wheels_folder
from ._plan import Plan
from ._read import Known, memory_of, read_dump, read_inputs, read_plan
from ._targets import Compiler, Target

#: The name that every step is compiled under.
_PLANNED = "planned_step"


@dataclasses.dataclass(frozen=True)
class Request:
    """A lowered step, and what is needed to read the compiled program.

    - `module`: the step, from `dump_module`.
    - `target`, `backend`: the devices to compile it for, and the compiler.
    - `devices`: the number of devices.
    - `sizes`: the sizes of the axes of its mesh.
    - `compiler_options`: options of XLA.
    - `names`: the paths of its arrays, by their names in the compiled text.
    - `gradients`: the shapes of gradients on one device, by the paths of their arrays.
    - `linted`: the description of the step for lint, with its batch axes.
    - `inputs`: the arrays that the step takes, if it is not ours.
    - `known`: the arrays and their memory, if the step is ours.
    - `examples`, `settings`, `findings`, `repeated`, `notes`: as in the plan, but of
        findings and notes those that are known before the step is compiled.
    """

    module: bytes
    target: Target
    backend: Compiler
    devices: int
    sizes: Mapping[str, int]
    compiler_options: Mapping[str, Any]
    names: Mapping[str, str]
    gradients: Mapping[str, tuple[int, ...]]
    linted: LintedStep
    inputs: tuple[Input, ...]
    known: Known | None
    examples: int | None
    settings: Mapping[str, str]
    findings: tuple[Finding, ...]
    repeated: tuple[str, ...]
    notes: tuple[str, ...]


class CompilerError(RuntimeError):
    """The compiler refused a step, or its process died."""


class Failure(NamedTuple):
    """An error in the process that compiles: what to raise, and its own traceback.

    A `UsageError`, or its twin for types, has no traceback.
    """

    kind: type[Exception]
    message: str
    traceback: str


#: The first line of the note on an error of another process.
ELSEWHERE = "In the process that compiles:"


def run(request: Request) -> Plan:
    """Compile a step in another process, and return the plan that it makes.

    **Raises:**

    `CompilerError` if the compiler fails, or its process dies; `UsageError` if that process
    raised one; `RuntimeError` if the compiled program cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="eqxshard-plan-") as name:
        folder = Path(name)
        (folder / "request").write_bytes(pickle.dumps(request))
        command = "from eqxshard.planning._child import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", command, name],
            env=child_environment(folder, request.backend, request.devices),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        result = folder / "result"
        if not result.exists():
            raise CompilerError(explain_death(done.returncode, done.stderr))
        answer = pickle.loads(result.read_bytes())
    if isinstance(answer, Failure):
        error = answer.kind(answer.message)
        if answer.traceback:
            error.add_note(f"{ELSEWHERE}\n{answer.traceback}")
        raise error
    return answer


def child_environment(folder: Path, compiler: Compiler, devices: int) -> dict[str, str]:
    """The environment of a process that compiles.

    **Arguments:**

    - `folder`: where the compiler for CPUs writes its texts.
    - `compiler`: the backend.
    - `devices`: how many CPU devices to simulate, if it compiles for CPUs.
    """
    path = [entry or os.getcwd() for entry in sys.path]
    flags = os.environ.get("XLA_FLAGS", "")
    if compiler == "cpu":
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_pass_re=spmd-partitioning"
        flags = f"{flags} {dump} --xla_dump_hlo_as_text"
    else:  # The wheels beside JAX come first.
        path.append(str(wheels_folder()))
    return {
        **os.environ,
        # No TPU is there to be queried for its place in a cluster, or to be locked.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # XLA says nothing about a program that comes out of the cache.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices if compiler == "cpu" else 1),
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": flags.strip(),
    }


def explain_death(code: int, stderr: str) -> str:
    """The message about a process that ended without a result.

    **Arguments:**

    - `code`: its return code, as `subprocess` has it.
    - `stderr`: the text that it wrote there.
    """
    if code == -signal.SIGKILL:
        return (
            "the process that compiles was killed, most likely because memory ran out; "
            "close other programs, or plan fewer layers."
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    # A fatal line of XLA begins with F and the date.
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"F\d{4} |.*Check failed", line)]
    said = (fatal or lines or ["it said nothing"])[-1][:300]
    return (
        f"XLA ended the process that compiles ({how}: {said}); plan with backend='cpu', or "
        "another version of JAX."
    )


# In the other process


def main() -> None:
    """Answer the request in the folder that the command names."""
    folder = Path(sys.argv[1])
    try:
        request = pickle.loads((folder / "request").read_bytes())
        result = compile_request(request, folder / "dump")
    except Exception as error:
        result = describe_error(error)
    part = folder / "part"
    part.write_bytes(pickle.dumps(result))
    os.replace(part, folder / "result")


def describe_error(error: Exception) -> Failure:
    """The error to raise in the process that asked: its type, and text with a remedy.

    A mistake of the user's keeps both. An error of XLA's is a `CompilerError`; any other is
    one of this library, which could not read what XLA had compiled.
    """
    if isinstance(error, ON_PURPOSE):
        return Failure(type(error), str(error), "")
    kind, said = RuntimeError, type(error).__name__
    first = str(error).strip().split("\n")[0][:300].rstrip(".")
    message = f"the compiled program cannot be read ({said}: {first}); please report this."
    if isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError):
        kind = CompilerError
        message = f"the step could not be compiled ({said}: {first}); use backend='cpu'."
    shorten_traceback(error)
    return Failure(kind, message, "".join(traceback.format_exception(error)))


def compile_request(request: Request, dump: Path) -> Plan:
    """Compile a step that was lowered elsewhere, and read its plan.

    **Arguments:**

    - `request`: the step.
    - `dump`: where the compiler for CPUs writes the partitioned text.
    """
    start = time.perf_counter()
    devices = find_devices(request.target, request.backend, request.devices)
    text, analysis = compile_module(
        request.module, order_devices(devices, request.sizes), request.compiler_options
    )
    seconds = time.perf_counter() - start
    module = parse_module(text)
    known = request.known or read_inputs(request.inputs, module, analysis)
    with warnings.catch_warnings(record=True) as said:
        findings = [*request.findings]
        findings += lint_compiled(module, request.linted, request.inputs)
    notes = [*request.notes, *(str(each.message).removesuffix(".") for each in said)]
    if request.known is None:
        notes += _whole(request, known.leaves)
    if request.backend == "cpu":
        module = parse_module(read_dump(dump, request.devices, _PLANNED))
    rows = request.linted.batch_axes
    return read_plan(
        request.target,
        request.backend,
        request.devices,
        module,
        request.sizes,
        Causes(module, request.sizes, request.names, request.gradients, rows),
        notes,
        memory=memory_of(request.target, analysis, known),
        examples=request.examples,
        compile_seconds=seconds,
        leaves=known.leaves,
        settings=request.settings,
        findings=Findings(findings),
        repeated=request.repeated,
    )


def dump_module(lowered: jax.stages.Lowered) -> bytes:
    """A lowered function for another process with the same JAX."""
    module: Any = lowered.compiler_ir("stablehlo")
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


class CompiledModule(NamedTuple):
    """A module as XLA compiled it: the text, and its analysis of the memory."""

    text: str
    analysis: Any


def order_devices(devices: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """Devices in the order of a mesh, in which JAX lets neighbours share the best links."""
    if not sizes:
        return [*devices]
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=devices, axis_types=types
    )
    return [*mesh.devices.flat]


def compile_module(
    data: bytes, devices: Sequence[Any], compiler_options: Mapping[str, Any]
) -> CompiledModule:
    """Compile for devices of any kind, as JAX compiles a function that it has lowered.

    **Arguments:**

    - `data`: from `dump_module`.
    - `devices`: as many as it was lowered for.
    - `compiler_options`: options of XLA.
    """
    client = devices[0].client
    ids = np.array([device.id for device in devices])
    options = get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=ids.reshape(1, -1),
        env_options_overrides={**compiler_options},
        backend=client,
    )
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    with make_ir_context():
        module = ir.Module.parse(data)
        attributes = module.operation.attributes
        attributes["sym_name"] = ir.StringAttr.get(_PLANNED)
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(devices))
        attributes["mhlo.num_partitions"] = count
        main = find_main(module)
        # JAX leaves to XLA how to split what has no sharding.
        build = options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = _left_open(main.arg_attrs)
        build.allow_spmd_sharding_propagation_to_output = _left_open(main.result_attrs)
        # CPU devices are there, so their client loads the program as well.
        is_there = devices[0].platform == "cpu"
        executable = (client.compile_and_load if is_there else client.compile)(
            module,
            executable_devices=sharding._internal_device_list,
            compile_options=options,
        )
    text = "\n\n".join(each.to_string() for each in executable.hlo_modules())
    return CompiledModule(text, executable.get_compiled_memory_stats())


def _left_open(attributes: Any) -> list[bool]:
    """For each argument or result of a function, whether it has no sharding."""
    return ["sdy.sharding" not in each for each in attributes]


def _whole(request: Request, leaves: Sequence[Leaf]) -> Iterator[str]:
    """A note on arrays without a sharding that are whole on each of several devices."""
    names = [
        leaf.path
        for each, leaf in zip(request.inputs, leaves, strict=True)
        # Few numbers, such as those of a random key, are meant to be whole.
        if each.spec is None and math.prod(each.shape) > 2 * request.devices
        if leaf.bytes_per_device == leaf.bytes_whole
    ]
    if names and request.devices > 1:
        rest = "is whole on each device; give it a sharding"
        if len(names) > 1:
            rest = "are whole on each device; give them shardings"
        yield f"{first_few(names)} {rest}"
