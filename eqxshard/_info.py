"""`python -m eqxshard info`: versions, environment variables and devices, for an issue."""

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator

#: The prefixes of the packages and environment variables to print.
_PACKAGES = ("equinox", "eqxshard", "grain", "jax", "libtpu", "numpy", "nvidia-", "optax")
_PACKAGES += ("tensorstore",)
_VARIABLES = ("CUDA_", "EQXSHARD_", "EQX_", "JAX_", "LD_LIBRARY_PATH", "NCCL_", "XLA_")
_VARIABLES += ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")


def info() -> None:
    """Print what somebody who helps with a problem asks for first."""
    for line in _lines():
        # Flushed, because the search for devices may hang.
        print(line, flush=True)


def _lines() -> Iterator[str]:
    yield f"python       {platform.python_version()} on {platform.platform()}"
    found = importlib.metadata.distributions()
    # The remains of a removed package may have no name.
    names = {each.name: each.version for each in found if "Name" in each.metadata}
    yield from (f"{name:<12} {names[name]}" for name in _sorted(names, _PACKAGES))
    yield from (f"{name}={os.environ[name]}" for name in _sorted(os.environ, _VARIABLES))
    # Imported last: JAX itself may be what is broken.
    import jax

    kinds = Counter((x.platform, x.device_kind) for x in jax.devices())
    for (name, kind), count in kinds.items():
        yield f"devices      {count} x {kind} ({name})"


def _sorted(names: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if name.startswith(prefixes))
