"""The devices that a run may be planned for, and how fast they are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import jax

from .._errors import UsageError
from ..sharding._peaks import peaks_of
from ..sharding._text import comma_list, did_you_mean
from ._efficiency import GPUS, Efficiency

Compiler = Literal["gpu", "tpu", "cpu"]

#: The chips of a host with TPUs.
TPU_HOST = 4


@dataclass(frozen=True)
class Target:
    """A kind of device, for [`eqxshard.plan`][].

    For another network, or a limit on memory, change the fields of a known one:
    `dataclasses.replace(eqxshard.planning.Target.named("h200"), network=25e9)`. A field
    that is `None` is not known, and whatever follows from it is not predicted.

    - `name`: a short name, such as `h200`.
    - `kind`: JAX's name of the kind of device.
    - `compiler`: the backend of XLA that compiles for it: `gpu`, `tpu` or `cpu`.
    - `memory`: the bytes of its memory.
    - `bandwidth`: the bytes per second of its memory.
    - `link`: the bytes per second that a device sends to others of its host, in one
        direction; for TPUs, to others of its slice along one axis.
    - `network`: the bytes per second that it sends to another host (of TPUs, slice).
    - `per_host`: the number of devices that `link` joins: those of a host or a rack, or of
        a TPU's slice.
    - `flops`: by dtype, the operations per second of dense matrix products.
    - `switched`: whether a switch joins the devices of a host. Without one, as on boards of
        four, a device sends an equal part of `link` to each of the others.
    - `power`: the power limit, in watts.
    - `efficiency`: how much of these peaks steps reach, an
        [`eqxshard.planning.Efficiency`][], so that plans predict the time to expect; `None`
        if it is not known.
    - `config`: the compiler's description of the device: for GPUs the text of XLA's
        `GpuTargetConfigProto`, for TPUs the name of its topologies.
    """

    name: str
    kind: str
    compiler: Compiler
    memory: float | None
    bandwidth: float | None
    link: float | None
    network: float | None
    per_host: int
    flops: Mapping[str, float] = field(default_factory=dict)
    switched: bool = True
    power: float | None = None
    efficiency: Efficiency | None = None
    config: str = field(default="", repr=False)

    @staticmethod
    def named(name: str) -> "Target":
        """A known device.

        **Arguments:**

        - `name`: `a100`, `h100`, `h200`, `b200`, `b300`, `gb200`, `tpu-v4`, `tpu-v5e`,
            `tpu-v5p`, `tpu-v6e` or `cpu`.

        **Raises:**

        `ValueError` if the name is not one of these.
        """
        if name not in TARGETS:
            raise UsageError(
                f"there is no target {name!r}; {did_you_mean(name, [*TARGETS])}use one of "
                f"{comma_list([*TARGETS])}, or an eqxshard.planning.Target."
            )
        return TARGETS[name]


def target_here() -> Target:
    """The target that has the kind of the devices at hand.

    **Raises:**

    `ValueError` if there is none.
    """
    kind = jax.devices()[0].device_kind
    by_kind = {target.kind: target for target in TARGETS.values()}
    target = TARGETS[_CALLED[kind]] if kind in _CALLED else by_kind.get(kind)
    if target is None:
        raise UsageError(
            f"no target has the kind of the devices at hand, {kind}; give target= one of "
            f"{comma_list([*TARGETS])}, or an eqxshard.planning.Target."
        )
    return target


def cores_of(target: Target) -> int:
    """The number of a GPU's streaming multiprocessors; 1 for other devices."""
    found = re.search(r"core_count: (\d+)", target.config)
    return int(found[1]) if found else 1


@dataclass(frozen=True)
class _Chip:
    """The fields of a GPU that its compiler reads, besides those of its target.

    - `cores`: the number of streaming multiprocessors.
    - `units`: the float32 units of each.
    - `threads`: the most threads that each runs at a time.
    - `shared`: the bytes of shared memory of each.
    - `shared_per_block`: how many of these one block may ask for.
    - `cache`: the bytes of the L2 cache.
    - `clock`: in GHz.
    - `capability`: the CUDA compute capability.
    """

    cores: int
    units: int
    threads: int
    shared: int
    shared_per_block: int
    cache: int
    clock: float
    capability: tuple[int, int]


_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared}
  threads_per_core_limit: {chip.threads}
  core_count: {chip.cores}
  fpus_per_core: {chip.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {chip.cache}
  clock_rate_ghz: {chip.clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {chip.shared_per_block}
  cuda_compute_capability {{ major: {chip.capability[0]} minor: {chip.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{kind}"
"""


def _peaks_of(kind: str) -> Mapping[str, float]:
    peaks = peaks_of(kind)
    # Without them, plans would have no compute time, and nobody would notice.
    assert peaks, f"sharding/_peaks.py has no peaks of {kind}"
    return peaks


def _gpu(
    name: str,
    kind: str,
    chip: _Chip,
    *,
    memory: int,
    bandwidth: float,
    link: float,
    network: float,
    per_host: int = 8,
    power: float,
) -> Target:
    return Target(
        name=name,
        kind=kind,
        compiler="gpu",
        memory=float(memory),
        bandwidth=bandwidth,
        link=link,
        network=network,
        per_host=per_host,
        flops=_peaks_of(kind),
        power=power,
        efficiency=replace(GPUS, power=power),
        config=_GPU_CONFIG.format(chip=chip, memory=memory, bandwidth=bandwidth, kind=kind),
    )


def _tpu(
    name: str, kind: str, *, memory: float, bandwidth: float, link: float, slice: int
) -> Target:
    return Target(
        name=name,
        kind=kind,
        compiler="tpu",
        memory=memory,
        bandwidth=bandwidth,
        link=2 * link,  # A ring sends in both directions.
        network=6.25e9,
        per_host=slice,
        flops=_peaks_of(kind),
        config=name.removeprefix("tpu-"),
    )


# GPUs: the fields that the compiler reads are from the specifications in the XLA project
# (xla/backends/gpu/target_config/specs). NVLink, on boards of eight, has half of what
# NVIDIA's datasheets count in both directions (600, 900, 900 and 1,800 GB/s). The network
# is that of NVIDIA's DGX systems: each GPU has an InfiniBand port of 200 Gb/s with A100s,
# of 800 Gb/s with B300s (ConnectX-8), of 400 Gb/s with all others. Power limits, and the
# peaks of B300s and GB200s, are as published by those who rent and run them (verda.com,
# glennklockwood.com). A GB200 is one of the 72 GPUs that NVLink joins in an NVL72.
_HOPPER = _Chip(
    cores=132,
    units=128,
    threads=2048,
    shared=233472,
    shared_per_block=232448,
    cache=52428800,
    clock=1.98,
    capability=(9, 0),
)
# TPUs: memory from Google's pages of TPU versions; links, in one direction, and network
# from "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter 2.

#: The known kinds of devices, by name.
TARGETS = {
    target.name: target
    for target in (
        _gpu(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            _Chip(
                cores=108,
                units=64,
                threads=2048,
                shared=167936,
                shared_per_block=166912,
                cache=41943040,
                clock=1.41,
                capability=(8, 0),
            ),
            memory=85_100_068_864,
            bandwidth=2.03904e12,
            link=300e9,
            network=25e9,
            power=400.0,
        ),
        _gpu(
            "h100",
            "NVIDIA H100 80GB HBM3",
            _HOPPER,
            memory=84_942_979_072,
            bandwidth=3.35232e12,
            link=450e9,
            network=50e9,
            power=700.0,
        ),
        _gpu(
            "h200",
            "NVIDIA H200 141GB HBM3e",
            _HOPPER,
            memory=151_397_597_184,
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            power=700.0,
        ),
        _gpu(
            "b200",
            "NVIDIA B200",
            _Chip(
                cores=148,
                units=128,
                threads=2048,
                shared=233472,
                shared_per_block=232448,
                cache=132644864,
                clock=1.965,
                capability=(10, 0),
            ),
            memory=191_514_411_008,
            bandwidth=7.67232e12,
            link=900e9,
            network=50e9,
            power=1000.0,
        ),
        _gpu(
            "b300",
            "NVIDIA B300",
            _Chip(
                cores=158,
                units=128,
                threads=2048,
                shared=233472,
                shared_per_block=232448,
                cache=135528448,
                clock=1.965,
                capability=(10, 3),
            ),
            memory=297_021_865_984,
            bandwidth=7.936e12,
            link=900e9,
            network=100e9,
            power=1100.0,
        ),
        _gpu(
            "gb200",
            "NVIDIA GB200",
            _Chip(
                cores=152,
                units=128,
                threads=2048,
                shared=233472,
                shared_per_block=232448,
                cache=135528448,
                clock=2.062,
                capability=(10, 0),
            ),
            memory=197_897_748_480,
            bandwidth=7.928064e12,
            link=900e9,
            network=50e9,
            per_host=72,
            power=1200.0,
        ),
        _tpu("tpu-v4", "TPU v4", memory=32e9, bandwidth=1.228e12, link=45e9, slice=4096),
        _tpu("tpu-v5e", "TPU v5e", memory=16e9, bandwidth=8.19e11, link=45e9, slice=256),
        _tpu("tpu-v5p", "TPU v5p", memory=95e9, bandwidth=2.765e12, link=90e9, slice=8960),
        _tpu("tpu-v6e", "TPU v6e", memory=32e9, bandwidth=1.638e12, link=90e9, slice=256),
        Target("cpu", "cpu", "cpu", None, None, None, None, per_host=2**31),
    )
}
#: What JAX calls devices at hand where it is not the `kind` of their target.
_CALLED = {
    "NVIDIA H200": "h200",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
}
