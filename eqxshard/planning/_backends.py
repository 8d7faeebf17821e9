"""Where the compilers are: wheels beside JAX, or in a folder of their own."""

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import NamedTuple

import jax
import platformdirs

from ..sharding._paths import local_path
from ._targets import Compiler, Target

#: The names of a compiler's wheel, and of the module that it installs.
_WHEELS = {
    "gpu": {
        "jax-cuda12-pjrt": "jax_plugins.xla_cuda12",
        "jax-cuda13-pjrt": "jax_plugins.xla_cuda13",
    },
    "tpu": {"libtpu": "libtpu"},
}


class Backend(NamedTuple):
    """A compiler, and the folder that it is in, if it is not installed beside JAX."""

    compiler: Compiler
    folder: Path | None = None


def find_backend(target: Target, wanted: Compiler | None) -> Backend:
    """The compiler for a target, or that for CPUs if it is not installed.

    **Raises:**

    `ValueError` if the wanted one is not installed, is not for this target, or is of
    another version than JAX.
    """
    if "cpu" in (wanted, target.compiler):
        if wanted not in (None, "cpu"):
            raise ValueError(
                f"backend={wanted!r} does not compile for the target {target.name}; leave "
                "it out, or use another target."
            )
        return Backend("cpu")
    if wanted not in (None, target.compiler):
        raise ValueError(
            f"backend={wanted!r} does not compile for the target {target.name}; use "
            f"{target.compiler!r} or 'cpu'."
        )
    folder = wheels_folder()
    for wheel, module in _WHEELS[target.compiler].items():
        if _is_importable(module):
            _check_version(wheel, importlib.metadata.version(wheel), target.compiler)
            return Backend(target.compiler)
        if folder.joinpath(*module.split(".")).is_dir():
            stem = wheel.replace("-", "_")
            for info in folder.glob(f"{stem}-*.dist-info"):
                version = info.name.removeprefix(f"{stem}-").removesuffix(".dist-info")
                _check_version(wheel, version, target.compiler)
            return Backend(target.compiler, folder)
    if wanted is None:
        return Backend("cpu")
    if platform.system() != "Linux":
        raise ValueError(
            f"the compiler for {target.name} is a wheel for Linux only, and this is "
            f"{platform.system()}; plan with backend='cpu', or on Linux."
        )
    command = install(target.compiler)
    raise ValueError(f"the compiler for {target.name} is not installed; run `{command}`.")


def wheels_folder() -> Path:
    """The folder for compilers: `$EQXSHARD_PLAN_DIR`, or one in the user's cache."""
    given = os.environ.get("EQXSHARD_PLAN_DIR")
    if given:
        return local_path(given, "$EQXSHARD_PLAN_DIR")
    return platformdirs.user_cache_path("eqxshard") / "plan"


def install(compiler: str) -> str:
    """The command that installs a compiler where no other process sees it."""
    (wheel, *_) = _WHEELS[compiler]
    return f'pip install --no-deps --target "{wheels_folder()}" "{_requirement(wheel)}"'


def _requirement(wheel: str) -> str:
    if wheel != "libtpu":
        return f"{wheel}=={jax.__version__}"
    found = importlib.metadata.requires("jax") or []
    return next((line for line in found if line.startswith(wheel)), wheel).split(";")[0]


def _check_version(wheel: str, version: str, compiler: str) -> None:
    if wheel != "libtpu" and version != jax.__version__:
        raise ValueError(
            f"{wheel} is of version {version} and JAX of {jax.__version__}, and they must "
            f"be the same; run `{install(compiler)} --upgrade`."
        )


def _is_importable(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # Not even its package.
        return False
    # A mere folder of that name is not a module.
    return spec is not None and spec.has_location
