"""What is known of a machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Devices:
    """The devices that JAX finds: their platform, and how many there are of each kind."""

    platform: str
    kinds: Mapping[str, int]


@dataclass(frozen=True)
class Disk:
    """The file system of a folder, in bytes."""

    name: str
    path: str
    free: int
    total: int


@dataclass(frozen=True)
class Cache:
    """The folder of JAX's compilation cache.

    - `is_foreign`: whether it belongs to another user.
    - `is_open`: whether all users may write to it.
    """

    path: str
    is_foreign: bool = False
    is_open: bool = False


@dataclass(frozen=True)
class Facts:
    """What is known of a machine.

    - `python`, `system`: the version, and the platform.
    - `packages`: the versions of those that are installed.
    - `needs`: the lowest version of each package that this library needs.
    - `needs_python`: the lowest version of Python.
    - `environment`: the variables that matter.
    - `driver`: the version of NVIDIA's driver, if there is one.
    - `gpus`: the names of NVIDIA's GPUs.
    - `links`: what `nvidia-smi topo -m` prints.
    - `devices`: what JAX finds; `None` if it fails, which `failure` says, or hangs.
    - `hangs`: whether JAX did not find devices in time.
    - `cache`: the compilation cache, if there is one.
    - `disks`: those that are used.
    - `cores`, `usable_cores`, `quota`: those of the machine, those that this process may
        run on, and how many of them a container may keep busy.
    - `hostname`, `resolves`: its name, and whether that has an address.
    """

    python: str = "3.11.0"
    system: str = "Linux"
    packages: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    needs_python: str = "3.11"
    environment: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    links: str = ""
    devices: Devices | None = None
    failure: str = ""
    hangs: bool = False
    cache: Cache | None = None
    disks: tuple[Disk, ...] = ()
    cores: int = 1
    usable_cores: int = 1
    quota: float | None = None
    hostname: str = "localhost"
    resolves: bool = True


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare it with another."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
