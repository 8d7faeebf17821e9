"""The devices that a run may be planned for, and how fast they are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
        if name not in _TARGETS:
            raise UsageError(
                f"there is no target {name!r}; {did_you_mean(name, [*_TARGETS])}use one of "
                f"{comma_list([*_TARGETS])}, or an eqxshard.planning.Target."
            )
        return _TARGETS[name]


def target_here() -> Target:
    """The target that has the kind of the devices at hand.

    **Raises:**

    `ValueError` if there is none.
    """
    kind = jax.devices()[0].device_kind
    # JAX calls a v5p "TPU v5", and a v5e "TPU v5 lite".
    name = re.sub(r"^(TPU v\d+) lite$", r"\1e", re.sub(r"^TPU v5$", "TPU v5p", kind))
    found = (each for each in _TARGETS.values() if each.kind.startswith(name))
    target = next(found, None)
    if target is None:
        raise UsageError(
            f"no target has the kind of the devices at hand, {kind}; give target= one of "
            f"{comma_list([*_TARGETS])}, or an eqxshard.planning.Target."
        )
    return target


def cores_of(target: Target) -> int:
    """The number of a GPU's streaming multiprocessors; 1 for other devices."""
    found = re.search(r"core_count: (\d+)", target.config)
    return int(found[1]) if found else 1


_GPU_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared[0]}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared[1]}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{kind}"
"""


def _gpu(
    name: str,
    kind: str,
    *,
    memory: int,
    bandwidth: float,
    link: float = 450e9,
    network: float = 50e9,
    per_host: int = 8,
    power: float,
    **chip: Any,
) -> Target:
    """A GPU; `chip` has what else its compiler reads, if it differs from Hopper's."""
    read = {**_HOPPER, **chip, "memory": memory, "bandwidth": bandwidth, "kind": kind}
    return Target(
        name=name,
        kind=kind,
        compiler="gpu",
        memory=float(memory),
        bandwidth=bandwidth,
        link=link,
        network=network,
        per_host=per_host,
        flops=peaks_of(kind),
        power=power,
        efficiency=replace(GPUS, power=power),
        config=_GPU_CONFIG.format(**read),
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
        flops=peaks_of(kind),
        config=name.removeprefix("tpu-"),
    )


# GPUs: the fields that the compiler reads are from the specifications in the XLA project
# (xla/backends/gpu/target_config/specs). NVLink, on boards of eight, has half of what
# NVIDIA's datasheets count in both directions (600, 900, 900 and 1,800 GB/s). The network
# is that of NVIDIA's DGX systems: each GPU has an InfiniBand port of 200 Gb/s with A100s,
# of 800 Gb/s with B300s (ConnectX-8), of 400 Gb/s with all others. Power limits, and the
# peaks of B300s and GB200s, are as published by those who rent and run them (verda.com,
# glennklockwood.com). A GB200 is one of the 72 GPUs that NVLink joins in an NVL72.
_HOPPER: dict[str, Any] = dict(
    cores=132,
    units=128,
    shared=(233472, 232448),
    cache=52428800,
    clock=1.98,
    capability=(9, 0),
)
# TPUs: memory from Google's pages of TPU versions; links, in one direction, and network
# from "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter 2.
_TARGETS = {
    target.name: target
    for target in (
        _gpu(
            "a100",
            "NVIDIA A100-SXM4-80GB",
            memory=85_100_068_864,
            bandwidth=2.03904e12,
            link=300e9,
            network=25e9,
            cores=108,
            units=64,
            shared=(167936, 166912),
            cache=41943040,
            clock=1.41,
            capability=(8, 0),
            power=400.0,
        ),
        _gpu(
            "h100",
            "NVIDIA H100 80GB HBM3",
            memory=84_942_979_072,
            bandwidth=3.35232e12,
            power=700.0,
        ),
        _gpu(
            "h200",
            "NVIDIA H200 141GB HBM3e",
            memory=151_397_597_184,
            bandwidth=4.8e12,
            power=700.0,
        ),
        _gpu(
            "b200",
            "NVIDIA B200",
            memory=191_514_411_008,
            bandwidth=7.67232e12,
            link=900e9,
            cores=148,
            cache=132644864,
            clock=1.965,
            capability=(10, 0),
            power=1000.0,
        ),
        _gpu(
            "b300",
            "NVIDIA B300",
            memory=297_021_865_984,
            bandwidth=7.936e12,
            link=900e9,
            network=100e9,
            cores=158,
            cache=135528448,
            clock=1.965,
            capability=(10, 3),
            power=1100.0,
        ),
        _gpu(
            "gb200",
            "NVIDIA GB200",
            memory=197_897_748_480,
            bandwidth=7.928064e12,
            link=900e9,
            per_host=72,
            cores=152,
            cache=135528448,
            clock=2.062,
            capability=(10, 0),
            power=1200.0,
        ),
        _tpu("tpu-v4", "TPU v4", memory=32e9, bandwidth=1.228e12, link=45e9, slice=4096),
        _tpu("tpu-v5e", "TPU v5e", memory=16e9, bandwidth=8.19e11, link=45e9, slice=256),
        _tpu("tpu-v5p", "TPU v5p", memory=95e9, bandwidth=2.765e12, link=90e9, slice=8960),
        _tpu("tpu-v6e", "TPU v6e", memory=32e9, bandwidth=1.638e12, link=90e9, slice=256),
        Target("cpu", "cpu", "cpu", None, None, None, None, per_host=2**31),
    )
}
