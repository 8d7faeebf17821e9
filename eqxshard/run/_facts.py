"""Facts about this process: its devices and their memory, versions, the machine."""

import contextlib
import importlib.metadata
import platform
import shlex
import sys
from typing import Any

import jax
from jax.sharding import Mesh

#: The packages whose versions matter most, and the plugins for accelerators.
_PACKAGES = ("jax", "jaxlib", "equinox", "optax", "tensorstore", "grain", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")


def describe_devices(mesh: Mesh) -> dict[str, Any]:
    """The mesh of a run, its devices, the machine and the command, as JSON values."""
    first, *others = mesh.devices.flat
    beside = [each for each in others if each.process_index == first.process_index]
    return {
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "devices": {
            "kind": first.device_kind,
            "count": mesh.size,
            "per_process": 1 + len(beside),
        },
        "system": platform.platform(),
        # Not shown on the page, which users attach to issues.
        "host": platform.node(),
        "command": shlex.join(sys.argv),
    }


def versions() -> dict[str, str]:
    """The versions of Python, of this library, and of the packages that it is built on."""
    # Importing eqxshard here would be circular.
    ours = {"python": platform.python_version()}
    ours |= {"eqxshard": sys.modules["eqxshard"].__version__}
    for name in (*_PACKAGES, *_PLUGINS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            ours[name] = importlib.metadata.version(name)
    return ours


def peak_memory() -> dict[str, int] | None:
    """The peak of memory use of a device of this process, and its limit, in bytes.

    `None` if the devices do not say, as CPUs do not.
    """
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in found if "peak_bytes_in_use" in each]
    limits = [each["bytes_limit"] for each in found if "bytes_limit" in each]
    if not peaks:
        return None
    return {"peak": max(peaks)} | ({"limit": min(limits)} if limits else {})
