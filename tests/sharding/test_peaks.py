"""The table of devices' peaks: by their names, and by dtype."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from eqxshard.sharding._peaks import mfu, peak_flops


def device(kind):
    return SimpleNamespace(device_kind=kind)


# As JAX names them.
KINDS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA B200": 2.25e15,
    "NVIDIA B300": 2.25e15,
    "NVIDIA GB200": 2.5e15,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GB300": None,
    "NVIDIA L4": None,
    "TPU v4 lite": None,
    "cpu": None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_of_a_device(kind):
    assert peak_flops(device(kind)) == KINDS[kind]


def test_the_peak_by_dtype():
    h200 = device("NVIDIA H200")
    assert peak_flops(h200, jnp.float16) == 989.5e12
    assert peak_flops(h200, "float32") == 494.75e12
    assert peak_flops(h200, jnp.float8_e4m3fn) == 1979e12
    assert peak_flops(device("NVIDIA A100-SXM4-40GB"), "float8_e5m2") is None
    assert peak_flops(device("TPU v5 lite"), "int8") == 394e12


def test_the_simulated_devices_of_these_tests_have_none():
    assert peak_flops() is None
    assert mfu(1e5, 1e9) is None
    # 8 of them.
    assert mfu(1e5, 1e9, peak=1e14) == pytest.approx(1 / 8)
