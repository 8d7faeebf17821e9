"""Devices that JAX does not find, and settings that hide them."""

import re
from collections.abc import Iterator

from ._check_versions import OLDEST_DRIVER, best_cuda, install
from ._facts import Facts, Finding, version_key

#: What `nvidia-smi topo -m` calls links other than NVLink, the slowest first.
_SLOW_LINKS = {
    "SYS": "across processors",
    "NODE": "across PCIe host bridges",
    "PHB": "across a PCIe host bridge",
    "PXB": "across PCIe bridges",
    "PIX": "across a PCIe bridge",
}


def check_start(facts: Facts) -> Iterator[Finding]:
    """JAX that does not start, or does not come back."""
    if facts.hangs:
        command = (
            "nvidia-smi" if facts.driver else "JAX_PLATFORMS=cpu python -m eqxshard doctor"
        )
        yield Finding(
            "JAX looks for devices and does not come back: a driver hangs, another program "
            "holds the device, or other programs keep all cores busy.",
            command,
        )
    elif facts.devices is None and "jax" in facts.packages:
        yield Finding(
            f"JAX does not start: {facts.failure or 'it ends without a word'}",
            'python -c "import jax; print(jax.devices())"',
        )


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs that are there, and that JAX does not use."""
    if facts.driver is None or facts.devices is None or facts.devices.platform != "cpu":
        return
    if hides_gpus(facts):
        return  # The settings that do have findings of their own.
    cuda = best_cuda(facts.driver)
    if cuda is None:
        yield Finding(
            f"NVIDIA's driver {facts.driver} is older than {OLDEST_DRIVER['cuda12']}, "
            "which JAX needs.",
            "sudo apt-get install --only-upgrade nvidia-driver-580",
        )
        return
    there = [each for each in OLDEST_DRIVER if f"jax-{each}-plugin" in facts.packages]
    if not there:
        yield Finding(
            f"There is an NVIDIA driver ({facts.driver}), and JAX is installed for CPUs "
            "only.",
            install(facts, cuda),
        )
    elif version_key(facts.driver) < version_key(OLDEST_DRIVER[there[0]]):
        oldest = OLDEST_DRIVER[there[0]]
        yield Finding(
            f"jax-{there[0]}-plugin needs NVIDIA's driver {oldest}, and this is "
            f"{facts.driver}.",
            f"pip uninstall -y jax-{there[0]}-plugin jax-{there[0]}-pjrt && "
            f"{install(facts, cuda)}",
        )
    elif facts.environment.get("LD_LIBRARY_PATH"):
        yield Finding(
            "JAX finds no GPU although its plug-in is installed; LD_LIBRARY_PATH may lead "
            "it to other libraries of CUDA than its own.",
            "unset LD_LIBRARY_PATH",
        )
    else:
        yield Finding(
            "JAX finds no GPU although its plug-in is installed.",
            'JAX_PLATFORMS=cuda python -c "import jax; jax.devices()"',
        )


def hides_gpus(facts: Facts) -> bool:
    """Whether a setting keeps JAX off the GPUs."""
    platforms = facts.environment.get("JAX_PLATFORMS", "").split(",")
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    return platforms == ["cpu"] or visible in ("", "-1", "NoDevFiles")


def check_visible(facts: Facts) -> Iterator[Finding]:
    """`CUDA_VISIBLE_DEVICES` that hides all GPUs, or names some that are not there."""
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or facts.driver is None:
        return
    if visible in ("", "-1", "NoDevFiles"):
        yield Finding(
            f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU.",
            "unset CUDA_VISIBLE_DEVICES",
        )
        return
    numbers = [int(part) for part in visible.split(",") if part.strip().isdigit()]
    beyond = [number for number in numbers if number >= len(facts.gpus)]
    if beyond and facts.gpus:
        yield Finding(
            f"CUDA_VISIBLE_DEVICES={visible} names GPU {beyond[0]}, and there are "
            f"{len(facts.gpus)}, counted from 0.",
            "unset CUDA_VISIBLE_DEVICES",
        )


def check_platforms(facts: Facts) -> Iterator[Finding]:
    """`JAX_PLATFORMS` that hides devices, or asks for some that are not there."""
    platforms = facts.environment.get("JAX_PLATFORMS")
    if not platforms:
        return
    if platforms == "cpu" and facts.driver is not None:
        yield Finding(
            "JAX_PLATFORMS=cpu keeps JAX off the GPUs of this machine.",
            "unset JAX_PLATFORMS",
            is_wrong=False,
        )
    wants = {"cuda", "gpu"} & {*platforms.split(",")}
    if wants and facts.driver is None:
        yield Finding(
            f"JAX_PLATFORMS={platforms} asks for GPUs, and there is no NVIDIA driver.",
            "unset JAX_PLATFORMS",
        )


def check_flags(facts: Facts) -> Iterator[Finding]:
    """`XLA_FLAGS` that XLA refuses."""
    for word in facts.environment.get("XLA_FLAGS", "").split():
        if not re.fullmatch(r"--\w+(=.*)?", word):
            yield Finding(
                f"XLA_FLAGS has {word!r}, which is not of the form --flag=value: XLA ends "
                "the process.",
                "unset XLA_FLAGS",
            )


def check_simulated(facts: Facts) -> Iterator[Finding]:
    """Devices that are simulated, where that is set for all programs."""
    number = facts.environment.get("JAX_NUM_CPU_DEVICES")
    if number is not None and not (number.isdigit() and int(number)):
        yield Finding(
            f"JAX_NUM_CPU_DEVICES={number} is not a number of devices.",
            "unset JAX_NUM_CPU_DEVICES",
        )
        return
    flags = facts.environment.get("XLA_FLAGS", "")
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    found = number or (flag[1] if flag else None)
    if found and facts.devices is not None and facts.devices.platform == "cpu":
        name = "JAX_NUM_CPU_DEVICES" if number else "XLA_FLAGS"
        yield Finding(
            f"{name} has JAX simulate {found} CPU devices on {facts.usable_cores} cores.",
            f"unset {name}",
            is_wrong=False,
        )


def check_count(facts: Facts) -> Iterator[Finding]:
    """GPUs of which JAX finds only some."""
    devices = facts.devices
    if (
        devices is None
        or devices.platform != "gpu"
        or "CUDA_VISIBLE_DEVICES" in (facts.environment)
    ):
        return
    if 0 < devices.count < len(facts.gpus):
        yield Finding(f"JAX finds {devices.count} of {len(facts.gpus)} GPUs.", "nvidia-smi")


def check_links(facts: Facts) -> Iterator[Finding]:
    """GPUs without NVLink between them."""
    rows = [line.split() for line in facts.links.splitlines() if line.startswith("GPU")]
    count = len(rows)
    cells = {cell for row in rows for cell in row[1 : count + 1]} - {"X"}
    slow = next((name for name in _SLOW_LINKS if name in cells), None)
    if slow is not None:
        yield Finding(
            f"Some GPUs are linked without NVLink, {_SLOW_LINKS[slow]} ({slow}), so what "
            "they send takes long; keep fsdp and tensor on those with NVLink.",
            "nvidia-smi topo -m",
            is_wrong=False,
        )
