"""Compile here, run there: what was compiled for a plan, in JAX's own cache."""

from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from ..transforms._cache import cache_compilations


def keep_compiled(lower: Callable[[], jax.stages.Lowered], folder: Path) -> str:
    """Compile a program into the folder of JAX's persistent compilation cache.

    It is compiled again for this, because the plan itself needs what the compiler reports,
    and it reports less about a program that comes out of the cache.

    **Arguments:**

    - `lower`: lowers the program.
    - `folder`: made if it is not there.

    **Returns:**

    A note for the plan.
    """
    # Plans are compiled without the cache, and JAX decides only once whether to use it.
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()
    if cache_compilations(folder) is None:
        return f"nothing is kept in {folder}, which others may write to"
    # Otherwise JAX would return the program that it has in memory.
    jax.clear_caches()
    lower().compile()
    kept = sorted(path.name for path in folder.glob("*-cache"))
    return f"the compiled step is in {folder}" if kept else f"nothing is kept in {folder}"
