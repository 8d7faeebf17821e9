"""The subprocess that compiles, and what to raise when it fails.

It is a separate process because it may need another platform than this one has started,
because an error in XLA's C++ ends the process, and so that its memory is given back.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import jax

from ..compiled._causes import user_line
from ..compiled._hlo import Frame
from ._backends import wheels_folder
from ._plan import Plan
from ._targets import Compiler

#: Set in the process that compiles.
CHILD = "EQXSHARD_PLANNING"

#: cuDNN's version, as JAX asks for it: only then does it compile for its attention. The
#: library itself is needed to run, not to compile.
_CUDNN = "def cudnn_get_version():\n    return 91000\n"

#: What XLA says when a kernel that it uses in JAX 0.12 fails.
_ONE_SHOT = ("one_shot", "size mismatch when packing")


class Failure(NamedTuple):
    """An error in the process that compiles: what to raise, and its own traceback."""

    kind: type[Exception]
    message: str
    traceback: str


def describe(error: Exception) -> Failure:
    """Say of an error whose it is, and what to do about it."""
    kind, message, said = RuntimeError, str(error), type(error).__name__
    first = message.strip().split("\n")[0][:300].rstrip(".")
    frames = reversed(traceback.extract_tb(error.__traceback__))
    line = user_line(Frame(x.filename, x.lineno or 0, x.name) for x in frames)
    by_compiler = isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError)
    if type(error) in (ValueError, TypeError):
        kind = type(error)
    elif isinstance(error, ImportError):
        message = (
            f"the process that compiles cannot import what it was sent ({first}); put it "
            "in a module that can be imported from here."
        )
    elif line is None and by_compiler:
        message = f"the step could not be compiled ({said}: {first}); use backend='cpu'."
    else:
        where = "" if line is None else f" at {line}"
        message = (
            f"making the model and its step raised {said}: {first}{where}; correct the "
            "script."
        )
    return Failure(kind, message, "".join(traceback.format_exception(error)))


def run(data: bytes, compiler: Compiler) -> Plan | int:
    """Compile in another process, and return what it finds.

    **Arguments:**

    - `data`: the request, as `dump_request` writes it.
    - `compiler`: its backend.

    **Returns:**

    The plan; the bytes of the state on each device if they alone are above the limit of
    the request.

    **Raises:**

    What it raised; `RuntimeError` if it died, or for an error of another type.
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
            raise RuntimeError(explain_death(done.returncode, done.stderr))
        answer = pickle.loads(result.read_bytes())
    if isinstance(answer, Failure):
        error = answer.kind(answer.message)
        error.add_note(f"In the process that compiles:\n{answer.traceback}")
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
        (plugin / "_versions.py").write_text(_CUDNN)
        # Behind the real one, if it is installed.
        path.append(str(folder / "stub"))
    # No TPU is there to be queried for its place in a cluster, or to be locked.
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    flags = os.environ.get("XLA_FLAGS", "")
    if compiler == "cpu":
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_pass_re=spmd-partitioning"
        flags = f"{flags} {dump} --xla_dump_hlo_as_text"
    return {
        **os.environ,
        **(tpu if compiler == "tpu" else {}),
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
    remedy = "plan with backend='cpu', or another version of JAX"
    if any(text in stderr for text in _ONE_SHOT):
        flag = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"
        remedy = f"XLA_FLAGS={flag} avoids it"
    return f"XLA ended the process that compiles ({how}: {said}); {remedy}."
