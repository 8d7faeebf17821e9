import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import eqxshard
from eqxshard.nn import peak_flops
from eqxshard.planning._targets import TARGETS, Target, target_here

GPUS = [name for name, target in TARGETS.items() if target.compiler == "gpu"]
NAMES = [name for name in TARGETS if name != "cpu"]
PAGE = Path(__file__).parents[2] / "docs/pages/guide/plan.md"


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


@pytest.mark.parametrize(
    "text",
    [eqxshard.plan.__doc__, Target.named.__doc__, PAGE.read_text()],
    ids=["plan", "Target.named", "guide"],
)
def test_every_name_is_documented(text):
    assert [name for name in TARGETS if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("cpu", "cpu"),
    ],
)
def test_the_target_of_the_devices_at_hand(monkeypatch, kind, name):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert target_here().name == name


@pytest.mark.parametrize(
    "kind", ["NVIDIA A100-SXM4", "NVIDIA H100", "NVIDIA H200 NVL", "NVIDIA L40", "TPU"]
)
def test_a_kind_that_begins_as_a_targets_is_none(monkeypatch, kind):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    with pytest.raises(eqxshard.UsageError, match=re.escape(kind)):
        target_here()
