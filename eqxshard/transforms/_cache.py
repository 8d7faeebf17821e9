"""Compiled programs that outlive the process."""

import hashlib
import os
import platform
from pathlib import Path

import jax
import platformdirs


def cache_compilations(directory: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs in a folder, so that the next start need not compile them.

    This is JAX's persistent compilation cache, for programs of any size. Call it before
    anything is compiled. The folder may be deleted at any time; where it cannot be
    written, JAX warns, and compiles. The recipes call it.

    **Arguments:**

    - `directory`: the folder; by default that of JAX's own setting (such as
        `JAX_COMPILATION_CACHE_DIR`), else one in the user's cache directory for
        processors like this one, since a program for a CPU runs only on its like.

    **Returns:**

    The folder.

    !!! Example

        ```python
        eqxshard.cache_compilations()
        ```
    """
    given = directory or jax.config.values["jax_compilation_cache_dir"]
    folder = Path(given) if given else _default_folder()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX's defaults leave out what compiles in less than a second, as most of a small
    # model's start does.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _default_folder() -> Path:
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:12]
    return platformdirs.user_cache_path("eqxshard") / "compiled" / kind


def _processor() -> str:
    """What tells processors apart that cannot run each other's programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
