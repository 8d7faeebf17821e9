"""GPUs that are not there: the devices of a topology, to compile for.

JAX compiles for them with the wheel `jax-cuda12-pjrt` of its own version alone;
`nox -s gpu_compile` puts it on the path.
"""

import functools

import pytest
from jax.experimental import topologies

#: From the GPU specifications that the XLA project publishes.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""


@functools.cache
def topology_devices(hosts: int, each: int) -> list:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x{hosts}x{each}"
    )
    return topology.devices


@pytest.fixture
def gpus() -> list:
    """Eight GPUs on one host."""
    return topology_devices(1, 8)
