"""GPUs that are not there: the devices of a topology, to compile for.

JAX compiles for them with the wheel `jax-cuda12-pjrt` of its own version alone;
`nox -s gpu_compile` puts it on the path.
"""

import functools

import pytest
from jax.experimental import topologies

from eqxshard.planning import Target


@functools.cache
def topology_devices(hosts: int, each: int) -> list:
    config = Target.named("h200").config
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"1x{hosts}x{each}"
    )
    return topology.devices


@pytest.fixture
def gpus() -> list:
    """Eight GPUs on one host."""
    return topology_devices(1, 8)
