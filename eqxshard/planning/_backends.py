"""XLA's compilers, in wheels beside JAX or in a folder of their own; and their devices."""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import platformdirs
from jax.experimental import topologies

from .._errors import UsageError
from ..sharding._files import local_path
from ..sharding._text import nearest_multiples
from ._targets import TPU_HOST, Compiler, Target

#: The wheels of each compiler, any of which will do.
_WHEELS = {"gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt"), "tpu": ("libtpu",)}


def find_backend(target: Target, wanted: Compiler | None) -> Compiler:
    """The compiler for a target, or that for CPUs if it is not installed.

    **Arguments:**

    - `target`: the kind of device.
    - `wanted`: the compiler that the user asks for; `None` for either of both.

    **Raises:**

    `ValueError` if the wanted compiler is not installed or not for this target, or if the
    installed one has another version than JAX.
    """
    if wanted not in (None, "cpu", target.compiler):
        raise UsageError(
            f"backend={wanted!r} does not compile for the target {target.name}; use "
            f"{target.compiler!r} or 'cpu'."
        )
    if "cpu" in (wanted, target.compiler):
        return "cpu"
    command, path = install(target.compiler), [*sys.path, str(wheels_folder())]
    for wheel in _WHEELS[target.compiler]:
        for found in importlib.metadata.distributions(name=wheel, path=path):
            if wheel != "libtpu" and found.version != jax.__version__:
                raise UsageError(
                    f"{wheel} is of version {found.version} and JAX of {jax.__version__}, "
                    f"and they must be the same; run `{command} --upgrade`."
                )
            return target.compiler
    if wanted is None:
        return "cpu"
    raise UsageError(
        f"the compiler for {target.name} is not installed; run `{command}` (on Linux), or "
        "use backend='cpu'."
    )


def wheels_folder() -> Path:
    """The folder for compilers: `$EQXSHARD_PLAN_DIR`, or one in the user's cache."""
    given = os.environ.get("EQXSHARD_PLAN_DIR")
    if given:
        return local_path(given, "$EQXSHARD_PLAN_DIR")
    return platformdirs.user_cache_path("eqxshard") / "plan"


def install(compiler: str) -> str:
    """The command that installs a compiler where only plans find it."""
    wheel = _WHEELS[compiler][0]
    requirement = f"{wheel}=={jax.__version__}"
    if wheel == "libtpu":  # JAX's own metadata say which version.
        asked = importlib.metadata.requires("jax") or []
        requirement = next((x for x in asked if x.startswith(wheel)), wheel).split(";")[0]
    return f'pip install --no-deps --target "{wheels_folder()}" "{requirement}"'


def check_whole_hosts(target: Target, compiler: Compiler, count: int) -> None:
    """Raise `ValueError` unless devices fill whole hosts, or whole slices of TPUs.

    Fewer devices than one host has are a part of it.
    """
    wholes = {"gpu": {"hosts": target.per_host}, "tpu": {"slices": target.per_host}}
    sizes = {name: size for name, size in wholes.get(compiler, {}).items() if count > size}
    if compiler == "tpu" and count > 2:
        sizes["hosts"] = TPU_HOST
    for name, size in sizes.items():
        if count % size:
            raise UsageError(
                f"{count} devices are not whole {name} of {size}; use "
                f"{nearest_multiples(count, size)}, or a Target with another per_host."
            )


def find_devices(target: Target, compiler: Compiler, count: int) -> list[Any]:
    """As many devices of a target as asked for, which need not be there."""
    if compiler == "cpu":
        return jax.devices()[:count]
    if compiler == "gpu":
        each = min(count, target.per_host)
        options = {"target_config": target.config, "topology": f"1x{count // each}x{each}"}
        return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    options = tpu_topology(target, count)
    return list(topologies.get_topology_desc(platform="tpu", **options).devices)


def tpu_topology(target: Target, count: int) -> dict[str, Any]:
    """The topology of some chips, as libtpu names it: two or three dims, nearly a cube."""
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
    """The prime factors of a number, the largest first."""
    smallest = next((factor for factor in range(2, n + 1) if n % factor == 0), None)
    return [] if smallest is None else [*_prime_factors(n // smallest), smallest]
