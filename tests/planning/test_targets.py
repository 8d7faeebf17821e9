import dataclasses
import re

import pytest

from eqxshard.nn import peak_flops
from eqxshard.planning._targets import Target

GPUS = ["a100", "h100", "h200", "b200", "b300", "gb200"]
NAMES = [*GPUS, "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"]


@pytest.mark.parametrize("name", NAMES)
def test_every_device_has_the_peaks_that_mfu_uses(name):
    target = Target.named(name)
    device = dataclasses.make_dataclass("Device", ["device_kind"])(target.kind)
    peak = peak_flops(device)
    assert peak and target.flops["bfloat16"] == peak
    assert target.memory and target.bandwidth and target.link and target.network
    # Links are slower than memory, and the network than links.
    assert target.network < target.link < target.bandwidth


@pytest.mark.parametrize("name", GPUS)
def test_the_compiler_reads_the_memory_and_bandwidth_of_the_table(name):
    target = Target.named(name)
    found = dict(re.findall(r"(\w+): (\d+)\b", target.config))
    assert int(found["device_memory_size"]) == target.memory
    assert int(found["memory_bandwidth"]) == target.bandwidth
