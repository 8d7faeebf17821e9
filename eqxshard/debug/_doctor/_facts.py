"""What is known of a machine, and how it is found out; nothing here can hang or fail."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: How long to wait for JAX, and for other commands.
_JAX_SECONDS, _COMMAND_SECONDS = 120.0, 20.0
_SHOWN = ("eqxshard", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")
_SHOWN += ("numpy", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin")
_SHOWN += ("jax-cuda13-pjrt", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
#: What the names of variables that matter begin with.
_PREFIXES = ("JAX_", "XLA_", "EQXSHARD_", "NCCL_", "SLURM_JOB_ID", "SLURM_NTASKS")
_PREFIXES += ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")

_LOOK = """
import collections, json, jax
found = jax.devices()
kinds = collections.Counter(device.device_kind for device in found)
print("\\n" + json.dumps({"platform": found[0].platform, "kinds": kinds}))
"""


class Devices(NamedTuple):
    """The devices that JAX finds: their platform, and how many there are of each kind."""

    platform: str
    kinds: Mapping[str, int]


class Disk(NamedTuple):
    """The file system of a folder, in bytes."""

    name: str
    path: str
    free: int
    total: int


@dataclass(frozen=True)
class Facts:
    """What is known of a machine.

    - `packages`: the versions of those that are installed.
    - `needs`: the lowest version of each package that this library needs.
    - `environment`: the variables that matter.
    - `driver`: the version of NVIDIA's driver, if there is one.
    - `gpus`: the names of NVIDIA's GPUs.
    - `devices`: what JAX finds; `None` if it fails, which `failure` says, or hangs.
    - `hangs`: whether JAX did not find devices in time.
    - `cache`, `cache_problem`: the folder of JAX's compilation cache, if there is one, and
        why it is not used.
    - `disks`: those that are used.
    - `hostname`, `resolves`: its name, and whether that has an address.
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: Sequence[str] = ()
    devices: Devices | None = None
    failure: str = ""
    hangs: bool = False
    cache: str | None = None
    cache_problem: str = ""
    disks: Sequence[Disk] = ()
    hostname: str = "localhost"
    resolves: bool = True


def gather() -> Facts:
    """The facts of this machine."""
    needs = _needs()
    smi = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    gpus = [line.split(", ", 1) for line in run(smi, _COMMAND_SECONDS).out.splitlines()]
    devices, failure, hangs = look_for_devices()
    cache, problem = _cache()
    host = socket.gethostname()
    # By a command that can be stopped: a name server may be long in answering.
    resolve = f"import socket; socket.gethostbyname({host!r})"
    return Facts(
        packages=_packages({*needs, *_SHOWN}),
        needs=needs,
        environment={k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)},
        driver=gpus[0][0] if gpus else None,
        gpus=[gpu[-1] for gpu in gpus],
        devices=devices,
        failure=failure,
        hangs=hangs,
        cache=cache,
        cache_problem=problem,
        disks=_disks(),
        hostname=host,
        resolves=run([sys.executable, "-c", resolve], _COMMAND_SECONDS).code == 0,
    )


class Ended(NamedTuple):
    """How a command ended: what it printed, and its status, `None` if it was stopped."""

    out: str
    err: str
    code: int | None


def run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command, but not for longer; one that fails or is not there prints nothing."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Ended("", str(error), 127)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        # What waits in a driver cannot be killed, so it is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return Ended("", "", None)
    return Ended(out if process.returncode == 0 else "", err, process.returncode)


def look_for_devices(
    code: str = _LOOK, seconds: float = _JAX_SECONDS
) -> tuple[Devices | None, str, bool]:
    """What JAX finds, in a process of its own: devices, why not, and whether it hangs."""
    # Without taking the memory of GPUs from those who use them.
    settings = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ended = run([sys.executable, "-c", code], seconds, settings)
    if ended.code is None:
        return None, "", True
    lines = [line for line in ended.out.splitlines() if line.startswith("{")]
    if lines:
        return Devices(**json.loads(lines[-1])), "", False
    said = [line.strip() for line in ended.err.splitlines() if line.strip()]
    return None, said[-1][:400] if said else f"exit status {ended.code}", False


def _needs() -> dict[str, str]:
    """The lowest version of each package that this library needs."""
    try:
        requires = importlib.metadata.requires("eqxshard") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    pattern = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)$")
    return {found[1]: found[2] for found in map(pattern.match, requires) if found}


def _packages(names: set[str]) -> dict[str, str]:
    found = {}
    for name in sorted(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cache() -> tuple[str | None, str]:
    path = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    with contextlib.suppress(ImportError, OSError):
        if path is None:
            import platformdirs

            path = str(platformdirs.user_cache_path("eqxshard") / "compiled")
        about = Path(path).stat()
        if hasattr(os, "getuid") and about.st_uid not in (0, os.getuid()):
            return path, "belongs to another user"
        return path, "can be written by all" if about.st_mode & stat.S_IWOTH else ""
    return None, ""


def _disks() -> list[Disk]:
    found = []
    places = {"current folder": str(Path.cwd()), "temporary folder": tempfile.gettempdir()}
    for name, path in (places | {"shared memory": "/dev/shm"}).items():
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            found.append(Disk(name, path, usage.free, usage.total))
    return found


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare it with another."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
