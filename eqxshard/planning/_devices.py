"""The devices that a step is compiled for, which are not there."""

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from ._request import Request
from ._targets import TPU_HOST, Target


def find_devices(request: Request) -> list[Any]:
    """As many devices as a request asks for, of its backend."""
    count, target = request.devices, request.target
    if request.backend == "cpu":
        return jax.devices()[:count]
    if request.backend == "gpu":
        each = min(count, target.per_host)
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.config,
            topology=f"1x{count // each}x{each}",
        )
        return list(topology.devices)
    topology = topologies.get_topology_desc(platform="tpu", **tpu_topology(target, count))
    return list(topology.devices)


def tpu_topology(target: Target, count: int) -> dict[str, Any]:
    """The topology of so many chips, as libtpu names it: two or three dims, near a cube."""
    slices = max(count // target.per_host, 1)
    chips, options = count // slices, dict[str, Any]()
    dims = 2 if target.config in ("v5e", "v6e") else 3
    # Hosts have four chips, two by two. Fewer are a part of one.
    shape = [2, 2, 1][:dims] if chips >= TPU_HOST else [chips, 1, 1][:dims]
    if chips < TPU_HOST:
        options["chips_per_host_bounds"] = (chips, 1, 1)
    for factor in _prime_factors(chips // TPU_HOST):
        shape[int(np.argmin(shape))] *= factor
    if slices > 1:
        options["num_slices"] = slices
    if target.config == "v4":  # Otherwise each chip counts as two devices.
        options["chip_config_name"] = "megacore"
    return {"topology_name": f"{target.config}:{'x'.join(map(str, shape))}", **options}


def _prime_factors(n: int) -> list[int]:
    """The largest first."""
    found, factor = [], 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found[::-1]
