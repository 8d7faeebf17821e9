"""Gathers the facts of this machine; nothing here can hang or fail."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._facts import Devices, Disk, Facts, Folder

#: How long to wait for JAX, and for a command of the driver.
_JAX_SECONDS, _COMMAND_SECONDS = 120.0, 20.0
_SHOWN = ("eqxshard", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")
_SHOWN += ("numpy", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin")
_SHOWN += ("jax-cuda13-pjrt", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_SHOWN += ("matplotlib", "tensorboard")
#: Variables that matter, beside those that begin with one of the prefixes.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "SLURM_JOB_ID", "SLURM_NTASKS")
_VARIABLES += ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "TPU_NAME")
_PREFIXES = ("JAX_", "XLA_", "EQXSHARD_", "NCCL_")

_LOOK = """
import collections, json, jax
found = jax.devices()
kinds = collections.Counter(device.device_kind for device in found)
print("\\n" + json.dumps({"platform": found[0].platform, "kinds": kinds}))
"""


def gather() -> Facts:
    """The facts of this machine."""
    needs, needs_python = _needs()
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
    gpus = run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], _COMMAND_SECONDS
    )
    links = run(["nvidia-smi", "topo", "-m"], _COMMAND_SECONDS) if gpus.out else gpus
    started = look_for_devices()
    total, free = _memory()
    name, resolves = _host()
    return Facts(
        python=platform.python_version(),
        system=platform.platform(),
        packages=_packages({*needs, *_SHOWN}),
        needs=needs,
        needs_python=needs_python,
        jaxlib=_jaxlib_bounds(),
        environment=environment,
        driver=_driver(),
        gpus=tuple(filter(None, gpus.out.splitlines())),
        links=links.out,
        devices=started[0],
        failure=started[1],
        hangs=started[2],
        folders=tuple(_folders(environment)),
        disks=tuple(_disks()),
        memory=total,
        memory_free=free,
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        quota=_quota(),
        hostname=name,
        resolves=resolves,
    )


class Ended:
    """How a command ended: what it printed, and whether it was stopped."""

    def __init__(self, out: str, err: str, code: int | None):
        self.out, self.err, self.code = out, err, code


def run(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command, but not for longer; without it, there is no output."""
    try:
        process = subprocess.Popen(
            command,
            env=None if environment is None else dict(environment),
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
    if ended.code == 0 and lines:
        found = json.loads(lines[-1])
        return Devices(found["platform"], found["kinds"]), "", False
    said = [line.strip() for line in ended.err.splitlines() if line.strip()]
    return None, said[-1][:400] if said else f"exit status {ended.code}", False


def _needs() -> tuple[dict[str, str], str]:
    """The lowest version of each package and of Python that this library needs."""
    try:
        about = importlib.metadata.distribution("eqxshard")
    except importlib.metadata.PackageNotFoundError:
        return {}, "3.11"
    needs = {}
    for text in about.requires or []:
        found = re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)$", text)
        if found:
            needs[found[1]] = found[2]
    python = (about.metadata["Requires-Python"] or "").removeprefix(">=")
    return needs, python or "3.11"


def _packages(names: set[str]) -> dict[str, str]:
    found = {}
    for name in sorted(names):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _jaxlib_bounds() -> tuple[str, str] | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for text in importlib.metadata.requires("jax") or []:
            low, high = re.search(r">=([\d.]+)", text), re.search(r"<=([\d.]+)", text)
            if text.startswith("jaxlib") and "extra" not in text and low and high:
                return low[1], high[1]
    return None


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"\b(\d{3}\.[\d.]+)\b", text):
            return found[1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = run(query, _COMMAND_SECONDS).out.split()
    return lines[0] if lines else None


def _folders(environment: Mapping[str, str]) -> list[Folder]:
    cache = environment.get("JAX_COMPILATION_CACHE_DIR")
    with contextlib.suppress(ImportError):
        import platformdirs

        cache = cache or str(platformdirs.user_cache_path("eqxshard") / "compiled")
    found = [_folder("compilation cache", cache, measured=True)] if cache else []
    if data := environment.get("EQXSHARD_DATA_DIR"):
        found.append(_folder("data", str(Path(data).expanduser())))
    return [*found, _folder("current", str(Path.cwd()))]


def _folder(name: str, path: str, *, measured: bool = False) -> Folder:
    place = Path(path)
    try:
        about = place.stat()
    except OSError:
        return Folder(name, path, exists=False)
    size = None
    if measured:
        size = 0
        for file in place.rglob("*"):
            with contextlib.suppress(OSError):
                size += file.stat().st_size if file.is_file() else 0
    return Folder(
        name,
        path,
        is_writable=os.access(place, os.W_OK | os.X_OK),
        is_foreign=hasattr(os, "getuid") and about.st_uid not in (0, os.getuid()),
        is_open=bool(about.st_mode & stat.S_IWOTH),
        nbytes=size,
    )


def _disks() -> list[Disk]:
    found = []
    places = {"current folder": str(Path.cwd()), "temporary folder": tempfile.gettempdir()}
    for name, path in (places | {"shared memory": "/dev/shm"}).items():
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            found.append(Disk(name, path, usage.free, usage.total))
    return found


def _memory() -> tuple[int | None, int | None]:
    """The memory of the host, and how much of it is free, within a container's limit."""
    values: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            values[name] = 1024 * int(rest.split()[0])
    total, free = values.get("MemTotal"), values.get("MemAvailable")
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total = limit if total is None else min(total, limit)
        free = limit - used if free is None else min(free, limit - used)
    return total, free


def _quota() -> float | None:
    """The cores that a container may keep busy."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def _host() -> tuple[str, bool]:
    name: Any = socket.gethostname()
    # By a command that can be stopped: a name server may be long in answering.
    ended = run(
        [sys.executable, "-c", f"import socket; socket.gethostbyname({name!r})"], 10.0
    )
    return name, ended.code == 0
