"""The peak FLOP/s of devices, and how much of them a model uses."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Rates of dense matrix products at full power, from NVIDIA's datasheets (which count twice
# as many, for sparse ones) and Google's pages of TPU versions. Factors in float32 are
# rounded to TF32 on GPUs, as JAX does by default. The first pattern that is found in a
# device's kind decides. Patterns are for whole words, so that a GB200, which has more
# power, is not taken for a B200.
_A100 = {"float32": 156e12, "float16": 312e12, "bfloat16": 312e12, "int8": 624e12}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "int8")


def _with_float8(bfloat16: float) -> dict[str, float]:
    """The peaks of GPUs since Hopper, which are twice as fast with 8 bits as with 16."""
    halves = {"float32": bfloat16 / 2, "float16": bfloat16, "bfloat16": bfloat16}
    return halves | dict.fromkeys(_FLOAT8, 2 * bfloat16)


_PEAKS = {
    r"A100\b": _A100,
    r"H100 PCIe": _with_float8(756.5e12),
    r"H[12]00 NVL": _with_float8(835.5e12),
    r"\bH[12]00\b": _with_float8(989.5e12),
    r"\bB200\b": _with_float8(2.25e15),
    r"\bB300\b": _with_float8(2.25e15) | {"int8": 0.15e15},
    r"\bGB200\b": _with_float8(2.5e15),
    r"TPU v4$": {"bfloat16": 275e12, "int8": 275e12},
    r"TPU v5( lite|e)$": {"bfloat16": 197e12, "int8": 394e12},
    r"TPU v5p?$": {"bfloat16": 459e12, "int8": 918e12},
    r"TPU v6( lite|e)$": {"bfloat16": 918e12, "int8": 1836e12},
}


def peak_flops(device: Any = None, dtype: Any = "bfloat16") -> float | None:
    """The peak FLOP/s of a device in dense matrix products.

    It knows NVIDIA's A100, H100, H200, B200, B300 and GB200 and Google's TPU v4, v5e, v5p
    and v6e.

    **Arguments:**

    - `device`: a `jax.Device`; the first of [`jax.devices`][] by default.
    - `dtype`: the dtype of the factors.

    **Returns:**

    Operations per second, where a multiplication and an addition count as two; `None` for
    a CPU, a device or a dtype that is not known, or a part of a GPU (MIG).

    !!! Example

        ```python
        eqxshard.nn.peak_flops(dtype="float16")  # 9.895e14 on an H200
        ```
    """
    kind = (jax.devices()[0] if device is None else device).device_kind
    return peaks_of(kind).get(jnp.dtype(dtype).name)


def peaks_of(kind: str) -> Mapping[str, float]:
    """The peak FLOP/s of a kind of device, by dtype; empty if the kind is not known."""
    if "MIG" in kind:
        return {}
    found = (peaks for pattern, peaks in _PEAKS.items() if re.search(pattern, kind))
    return next(found, {})


def mfu(
    tokens_per_second: float,
    flops_per_token: float,
    *,
    peak: float | None = None,
    devices: Sequence[Any] | None = None,
    dtype: Any = "bfloat16",
) -> float | None:
    """Model FLOPs utilization: a model's own FLOP/s over the peak of the devices.

    As defined in appendix B of [PaLM](https://arxiv.org/abs/2204.02311): operations that a
    step recomputes to save memory do not count.

    **Arguments:**

    - `tokens_per_second`: of all devices together.
    - `flops_per_token`: those of training the model, as
        [`eqxshard.nn.flops_per_token`][] counts them.
    - `peak`: the peak FLOP/s of one device; by default, as
        [`eqxshard.nn.peak_flops`][] knows it.
    - `devices`: those that compute, all of [`jax.devices`][] by default.
    - `dtype`: the dtype of the factors of matrix products.

    **Returns:**

    A number between 0 and 1; `None` if the peak is not known.

    !!! Example

        ```python
        mfu = eqxshard.nn.mfu(150_000, 8.2e8, peak=989e12)
        ```
    """
    devices = jax.devices() if devices is None else devices
    peak = peak_flops(devices[0], dtype) if peak is None else peak
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * len(devices))
