"""What is known of a machine, and what a check finds in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """What a check found.

    - `sentence`: what is wrong, or worth knowing.
    - `command`: what mends it, or shows more.
    - `is_wrong`: whether something cannot work; else it is only worth knowing.
    """

    sentence: str
    command: str
    is_wrong: bool = True


@dataclass(frozen=True)
class Devices:
    """The devices that JAX finds."""

    platform: str
    kinds: Mapping[str, int]

    @property
    def count(self) -> int:
        """Their number."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Folder:
    """A folder that is used.

    - `name`: what it is for.
    - `nbytes`: of its files; `None` if they were not counted.
    - `is_foreign`: whether it belongs to another user.
    - `is_open`: whether all users may write to it.
    """

    name: str
    path: str
    exists: bool = True
    is_writable: bool = True
    is_foreign: bool = False
    is_open: bool = False
    nbytes: int | None = None


@dataclass(frozen=True)
class Disk:
    """The file system of a folder, in bytes."""

    name: str
    path: str
    free: int
    total: int


@dataclass(frozen=True)
class Facts:
    """What is known of a machine.

    - `python`, `system`: the version, and the platform.
    - `packages`: the versions of those that are installed.
    - `needs`: the lowest version of each package that this library needs.
    - `needs_python`: the lowest version of Python.
    - `jaxlib`: the lowest and the highest version of jaxlib that JAX takes.
    - `environment`: the variables that matter.
    - `driver`: the version of NVIDIA's driver, if there is one.
    - `gpus`: the names of NVIDIA's GPUs.
    - `links`: what `nvidia-smi topo -m` prints.
    - `devices`: what JAX finds; `None` if it fails, which `failure` says, or hangs.
    - `hangs`: whether JAX did not find devices in time.
    - `folders`, `disks`: those that are used.
    - `memory`, `memory_free`: of the host, in bytes, within the limit of a container.
    - `cores`, `usable_cores`, `quota`: those of the machine, those that this process may
        run on, and how many of them a container may keep busy.
    - `hostname`, `resolves`: its name, and whether that has an address.
    """

    python: str = "3.11.0"
    system: str = "Linux"
    packages: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    needs_python: str = "3.11"
    jaxlib: tuple[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    links: str = ""
    devices: Devices | None = None
    failure: str = ""
    hangs: bool = False
    folders: tuple[Folder, ...] = ()
    disks: tuple[Disk, ...] = ()
    memory: int | None = None
    memory_free: int | None = None
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
