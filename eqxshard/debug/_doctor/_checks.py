"""What the doctor looks for: mistakes that have cost somebody a day."""

from collections.abc import Iterator
from typing import NamedTuple

from ._facts import Facts, version_key

_GB = 1_000_000_000
#: For each version of CUDA, the oldest driver that runs it; the newest CUDA first.
_OLDEST_DRIVER = {"cuda13": "580", "cuda12": "525"}


class Finding(NamedTuple):
    """What a check found.

    - `sentence`: what is wrong, or worth knowing.
    - `command`: what mends it, or shows more.
    - `is_wrong`: whether something cannot work; else it is only worth knowing.
    """

    sentence: str
    command: str
    is_wrong: bool = True


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Packages that are missing or too old."""
    for name, least in facts.needs.items():
        found = facts.packages.get(name)
        if found is None or version_key(found) < version_key(least):
            old = "is not installed" if found is None else f"{found} is older than {least}"
            yield Finding(f"{name} {old}.", f'pip install --upgrade "{name}>={least}"')


def check_start(facts: Facts) -> Iterator[Finding]:
    """JAX that does not start, or does not come back."""
    if facts.hangs:
        yield Finding(
            "JAX looks for devices and does not come back: a driver hangs, another program "
            "holds the device, or other programs keep all cores busy.",
            "nvidia-smi" if facts.driver else "ps aux --sort=-%cpu | head",
        )
    elif facts.devices is None and "jax" in facts.packages:
        yield Finding(
            f"JAX does not start: {facts.failure or 'it ends without a word'}",
            'python -c "import jax; print(jax.devices())"',
        )


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that are there, and that JAX does not use."""
    driver = facts.driver
    if driver is None or facts.devices is None or facts.devices.platform != "cpu":
        return
    if facts.environment.get("JAX_PLATFORMS") == "cpu":
        yield Finding(
            "JAX_PLATFORMS=cpu keeps JAX off the GPUs of this machine.",
            "unset JAX_PLATFORMS",
            is_wrong=False,
        )
        return
    if facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        yield Finding("CUDA_VISIBLE_DEVICES hides every GPU.", "unset CUDA_VISIBLE_DEVICES")
        return
    there = [cuda for cuda in _OLDEST_DRIVER if f"jax-{cuda}-plugin" in facts.packages]
    runs = [
        cuda
        for cuda, oldest in _OLDEST_DRIVER.items()
        if version_key(driver) >= version_key(oldest)
    ]
    if not runs or (there and there[0] not in runs):
        needed = (there or [*_OLDEST_DRIVER])[-1]
        yield Finding(
            f"JAX for {needed} needs NVIDIA's driver {_OLDEST_DRIVER[needed]}, and this is "
            f"{driver}; upgrade the driver, or JAX's plug-in to one that it runs.",
            _install(facts, runs[0])
            if runs
            else "sudo apt-get install --only-upgrade nvidia-driver-580",
        )
    elif not there:
        yield Finding(
            f"There is an NVIDIA driver ({driver}), and JAX is installed for CPUs only.",
            _install(facts, runs[0]),
        )
    else:
        yield Finding(
            "JAX finds no GPU although its plug-in is installed.",
            'JAX_PLATFORMS=cuda python -c "import jax; jax.devices()"',
        )


def check_cache(facts: Facts) -> Iterator[Finding]:
    """A compilation cache that others can write to."""
    if facts.cache_problem:
        yield Finding(
            f"The compilation cache {facts.cache} {facts.cache_problem}, so nothing is "
            "cached: what is in it would run here.",
            "export JAX_COMPILATION_CACHE_DIR=$HOME/.cache/jax",
        )


def check_disks(facts: Facts) -> Iterator[Finding]:
    """File systems that are nearly full."""
    for disk in facts.disks:
        if disk.name != "shared memory" and disk.free < 10 * _GB:
            yield Finding(
                f"{disk.free / _GB:.1f} GB are free for the {disk.name}, {disk.path}; "
                "checkpoints are at least three times the size of the model.",
                f"df -h {disk.path}",
                is_wrong=disk.free < _GB,
            )


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Little shared memory, as containers have by default."""
    for disk in facts.disks:
        if disk.name == "shared memory" and disk.total < _GB:
            yield Finding(
                f"{disk.path} has {disk.total / 1e6:.0f} MB in all, so a Loader with "
                "workers= may die of a bus error; a container gets more when it starts.",
                "docker run --shm-size=8g ...",
                is_wrong=False,
            )


def check_hostname(facts: Facts) -> Iterator[Finding]:
    """A name that other processes cannot reach."""
    if not facts.resolves:
        yield Finding(
            f"The name of this machine, {facts.hostname}, has no address, so processes of "
            "a cluster cannot reach each other.",
            f'echo "127.0.1.1 {facts.hostname}" | sudo tee -a /etc/hosts',
            is_wrong="SLURM_JOB_ID" in facts.environment,
        )


CHECKS = (
    check_versions,
    check_start,
    check_gpus,
    check_cache,
    check_disks,
    check_shared_memory,
    check_hostname,
)


def _install(facts: Facts, cuda: str) -> str:
    """The command that installs JAX for a version of CUDA."""
    jax = facts.packages.get("jax")
    return f'pip install --upgrade "jax[{cuda}]{f"=={jax}" if jax else ""}"'
