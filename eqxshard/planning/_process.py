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
from ._backends import Backend, install
from ._plan import Plan

#: Set in the process that compiles.
CHILD = "EQXSHARD_PLANNING"

#: cuDNN's version, as JAX asks for it: only then does it compile for its attention. The
#: library itself is needed to run, not to compile.
_CUDNN = "def cudnn_get_version():\n    return 91000\n"

#: What XLA says when a kernel that it uses in JAX 0.12 fails.
_ONE_SHOT = ("one_shot", "size mismatch when packing")


class TooLarge(NamedTuple):
    """A step that is not compiled, because its state alone needs too many bytes."""

    needs: int


class Failure(NamedTuple):
    """An error in the process that compiles.

    - `kind`, `message`: its type, and what it said.
    - `line`: the line of the user's code that raised it, as `model.py:12`, if any did.
    - `by_compiler`: whether XLA raised it.
    - `traceback`: as Python prints it.
    """

    kind: str
    message: str
    line: str | None
    by_compiler: bool
    traceback: str

    @staticmethod
    def of(error: Exception) -> "Failure":
        """From an exception."""
        frames = traceback.extract_tb(error.__traceback__)
        return Failure(
            type(error).__name__,
            str(error),
            user_line(Frame(x.filename, x.lineno or 0, x.name) for x in reversed(frames)),
            isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError),
            "".join(traceback.format_exception(error)),
        )


def run(data: bytes, backend: Backend) -> Plan | TooLarge:
    """Compile in another process, and return what it finds.

    **Arguments:**

    - `data`: the request, as `dump_request` writes it.
    - `backend`: the compiler.

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
            env=_environment(folder, backend),
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
        raise _error(answer, backend)
    return answer


def _environment(folder: Path, backend: Backend) -> dict[str, str]:
    path = [entry or os.getcwd() for entry in sys.path]
    if backend.folder is not None:
        path.insert(0, str(backend.folder))
    if backend.compiler == "gpu":
        plugin = folder / "stub" / "jax_cuda12_plugin"
        plugin.mkdir(parents=True)
        (plugin / "__init__.py").touch()
        (plugin / "_versions.py").write_text(_CUDNN)
        # Behind the real one, if it is installed.
        path.append(str(folder / "stub"))
    # No TPU is there to be queried for its place in a cluster, or to be locked.
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    flags = os.environ.get("XLA_FLAGS", "")
    if backend.compiler == "cpu":
        dump = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_pass_re=spmd-partitioning"
        flags = f"{flags} {dump} --xla_dump_hlo_as_text"
    return {
        **os.environ,
        **(tpu if backend.compiler == "tpu" else {}),
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


def _error(failure: Failure, backend: Backend) -> Exception:
    """What to raise here."""
    kinds = {"ValueError": ValueError, "TypeError": TypeError}
    if failure.kind in kinds:
        error = kinds[failure.kind](failure.message)
    else:
        error = RuntimeError(_explain(failure, backend))
    error.add_note(f"In the process that compiles:\n{failure.traceback}")
    return error


def _explain(failure: Failure, backend: Backend) -> str:
    first = failure.message.strip().split("\n")[0][:300].rstrip(".")
    if failure.kind in ("ImportError", "ModuleNotFoundError"):
        return (
            f"the process that compiles cannot import what it was sent ({first}); put it "
            "in a module that can be imported from here."
        )
    said = f"{failure.kind}: {first}"
    if failure.line is not None or not failure.by_compiler:
        where = "" if failure.line is None else f" at {failure.line}"
        return f"making the model and its step raised {said}{where}; correct the script."
    remedy = "use backend='cpu'"
    if "topology not implemented" in first or "No visible GPU" in first:
        remedy = f"run `{install(backend.compiler)}`"
    return f"the step could not be compiled ({said}); {remedy}."
