"""The subprocess that compiles: what is sent to it, and what to raise when it fails.

It is a separate process because it may need another platform than this one has started,
because an error in XLA's C++ ends the process, and so that its memory is given back.

A request is pickled by cloudpickle, because optimizers are closures and functions are often
lambdas. But cloudpickle sends what a script defines by value, and the classes of Equinox's
modules do not survive that: the functions and classes of the script are sent by name, and
the other process imports the script.
"""

import dataclasses
import functools
import io
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from .._errors import ON_PURPOSE, UsageTypeError
from ..compiled._causes import user_frame
from ..compiled._findings import Finding
from ..compiled._hlo import Frame
from ..compiled._lowered import LoweredStep
from ..sharding._rule import Rule
from ..training._advice import shorten_traceback
from ..training._precision import Precision
from ._backends import wheels_folder
from ._plan import Plan
from ._script import import_script, script_path
from ._targets import Compiler, Target

#: Settings of JAX that change what is compiled, and which frames an error has.
_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_traceback_filtering",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of [`eqxshard.plan`][], checked.

    - `batch`: a `jax.ShapeDtypeStruct` for each array.
    - `backend`: the compiler.
    - `options`: of `make_train_step`, other than those that `init_state` takes, too.
    - `explicit`: the axes of the mesh that are Explicit.
    - `cache`: the folder in which to keep what was compiled.
    """

    make_model: Callable[[Any], PyTree]
    loss_fn: Callable[..., Any]
    optim: optax.GradientTransformation
    batch: PyTree
    mesh_shape: Mapping[str, int]
    rule: Rule
    target: Target
    backend: Compiler
    trainable: PyTree
    precision: Precision | None
    options: Mapping[str, Any]
    explicit: bool | Sequence[str] = False
    cache: Path | None = None

    @property
    def devices(self) -> int:
        """Their number."""
        return math.prod(self.mesh_shape.values())


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """What [`eqxshard.plan_step`][] sends: a function that is lowered already.

    - `module`: from `dump_module`.
    - `step`: what it takes.
    - `findings`, `scanned`: what lint found in it, and needs of it, as it was traced.
    - `repeated`: the axes of its mesh over which it splits nothing.
    - `notes`: what else to know of its plan.
    """

    module: bytes
    step: LoweredStep
    target: Target
    backend: Compiler
    findings: tuple[Finding, ...]
    scanned: set[tuple[int, ...]]
    repeated: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Their number."""
        return self.step.devices


def dump_request(request: Request | StepRequest) -> bytes:
    """Pickle a request.

    **Raises:**

    `TypeError` if a part of it cannot be pickled.
    """
    config = {name: getattr(jax.config, name) for name in _CONFIG}
    if request.backend == "cpu":
        config["jax_num_cpu_devices"] = request.devices
    out = io.BytesIO()
    pickle.dump(config, out)
    try:
        _Pickler(out).dump(request)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageTypeError(
            "plan compiles in another process, to which something cannot be sent "
            f"({error}); define the model, the loss function and the optimizer at the top "
            "level of a script or module."
        ) from error
    return out.getvalue()


def load_request(data: bytes) -> Request | StepRequest:
    """Set JAX up as it was where a request was pickled, and unpickle it."""
    file = io.BytesIO(data)
    # Before anything that may make an array.
    for name, value in pickle.load(file).items():
        jax.config.update(name, value)
    return pickle.load(file)


class _Pickler(cloudpickle.Pickler):
    """Sends what is at the top level of the script that runs by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            # cloudpickle 3.1.3 leaves out the file, which errors and findings name.
            reduced: Any = self.dispatch_table[types.CodeType](obj)
            return _make_code, (*reduced, obj.co_filename)
        is_code = isinstance(obj, type | types.FunctionType)
        if is_code and getattr(obj, "__module__", None) == "__main__":
            script, name = script_path(), obj.__qualname__
            if script is not None and _lookup(sys.modules["__main__"], name) is obj:
                return _from_script, (script, name)
            if isinstance(obj, type) and issubclass(obj, eqx.Module):
                raise UsageTypeError(f"class {obj.__name__} is in no file's top level")
        return super().reducer_override(obj)


def _from_script(script: str, name: str) -> Any:
    return _lookup(import_script(script), name)


def _lookup(module: Any, name: str) -> Any:
    return functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), module)


def _make_code(
    make: Callable[..., types.CodeType], arguments: tuple[Any, ...], file: str
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file)


#: Set in the process that compiles.
CHILD = "EQXSHARD_PLANNING"


#: The first line of the note on an error that this library did not raise on purpose.
ELSEWHERE = "In the process that compiles:"


class CompilerError(RuntimeError):
    """The compiler refused a step, or its process died."""


class Failure(NamedTuple):
    """An error in the process that compiles: what to raise, and its own traceback.

    A `UsageError`, or its twin for types, has no traceback.
    """

    kind: type[Exception]
    message: str
    traceback: str


def describe(error: Exception) -> Failure:
    """Say of an error whose it is, and what to do about it."""
    if isinstance(error, ON_PURPOSE):
        return Failure(type(error), str(error), "")
    kind, message, said = RuntimeError, str(error), type(error).__name__
    first = message.strip().split("\n")[0][:300].rstrip(".")
    frames = reversed(traceback.extract_tb(error.__traceback__))
    frame = user_frame(Frame(x.filename, x.lineno or 0, x.name) for x in frames)
    by_compiler = isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError)
    if type(error) in (ValueError, TypeError):
        kind = type(error)
    elif frame is None and by_compiler:
        kind = CompilerError
        message = f"the step could not be compiled ({said}: {first}); use backend='cpu'."
    else:
        where = "" if frame is None else f" at {frame.place}"
        message = (
            f"making the model and its step raised {said}: {first}{where}; correct the "
            "script."
        )
    shorten_traceback(error)
    return Failure(kind, message, "".join(traceback.format_exception(error)))


def run(data: bytes, compiler: Compiler) -> Plan:
    """Compile in another process, and return what it finds.

    **Arguments:**

    - `data`: the request, as `dump_request` writes it.
    - `compiler`: its backend.

    **Returns:**

    The plan.

    **Raises:**

    What it raised; `CompilerError` if it died; `RuntimeError` for an error of another type.
    """
    if CHILD in os.environ:
        raise RuntimeError(
            "eqxshard.plan was called while its own process imported this script; put the "
            "call under `if __name__ == '__main__':`."
        )
    with tempfile.TemporaryDirectory(prefix="eqxshard-plan-") as name:
        folder = Path(name)
        (folder / "request").write_bytes(data)
        command = "from eqxshard.planning._compile import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", command, name],
            env=_environment(folder, compiler),
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


def _environment(folder: Path, compiler: Compiler) -> dict[str, str]:
    path = [entry or os.getcwd() for entry in sys.path]
    if compiler != "cpu":  # Behind the wheels beside JAX.
        path.append(str(wheels_folder()))
    if compiler == "gpu":
        plugin = folder / "stub" / "jax_cuda12_plugin"
        plugin.mkdir(parents=True)
        (plugin / "__init__.py").touch()
        # JAX asks for cuDNN's version before it compiles for its attention; the library is
        # needed to run, not to compile.
        version = "def cudnn_get_version():\n    return 91000\n"
        (plugin / "_versions.py").write_text(version)
        # Behind the real one, if it is installed.
        path.append(str(folder / "stub"))
    flags = os.environ.get("XLA_FLAGS", "")
    if compiler == "cpu":
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_pass_re=spmd-partitioning"
        flags = f"{flags} {dump} --xla_dump_hlo_as_text"
    return {
        **os.environ,
        # No TPU is there to be queried for its place in a cluster, or to be locked.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # XLA reports nothing about a program that comes out of the cache.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": flags.strip(),
        CHILD: "1",
    }


def explain_death(code: int, stderr: str) -> str:
    """Why the process ended without a result."""
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
