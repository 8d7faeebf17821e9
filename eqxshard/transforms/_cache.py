"""Compiled programs that outlive the process."""

import contextlib
import hashlib
import logging
import os
import platform
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath

import jax
import platformdirs
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from ..sharding._files import as_text, is_remote, local_path

_LOG = logging.getLogger(__name__)


def cache_compilations(directory: str | os.PathLike[str] | None = None) -> PurePath | None:
    """Keep compiled programs in a folder, so that the next start need not compile them.

    This is JAX's persistent compilation cache, for programs of any size. Call it before
    anything is compiled. The folder may be deleted at any time; where it cannot be
    written, JAX warns, and compiles. The recipes call it.

    What is in the folder runs on the devices, so it must not be another user's, nor one
    that all users may write: then nothing is cached, and a warning says so.

    **Arguments:**

    - `directory`: the folder, or the address of one in an object store that JAX reaches,
        such as `gs://...`; by default that of JAX's own setting (such as
        `JAX_COMPILATION_CACHE_DIR`), else one in the user's cache directory for
        processors like this one, since a program for a CPU runs only on its like.

    **Returns:**

    The folder; `None` if it is not to be trusted.

    !!! Example

        ```python
        eqxshard.cache_compilations()
        ```
    """
    folder = directory or jax.config.values["jax_compilation_cache_dir"]
    if folder and is_remote(folder):
        from etils import epath  # Which JAX reads and writes it with.

        folder = epath.Path(as_text(folder))
    else:
        folder = local_path(folder or _default_folder(), "the folder of compiled programs")
        if is_writable_by_others(folder):
            _LOG.warning(
                "compiled programs are not cached in %s, which other users may write to; "
                "choose a folder of your own.",
                folder,
            )
            jax.config.update("jax_compilation_cache_dir", None)
            return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX's defaults leave out what compiles in less than a second, as most of a small
    # model's start does.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def is_writable_by_others(folder: Path) -> bool:
    """Whether another user may put programs into a folder, which is made if need be."""
    if not hasattr(os, "getuid"):
        return False
    with contextlib.suppress(OSError):  # JAX warns that it cannot be written.
        folder.mkdir(parents=True, exist_ok=True)
        about = folder.stat()
        return about.st_uid not in (0, os.getuid()) or bool(about.st_mode & stat.S_IWOTH)
    return False


@contextlib.contextmanager
def compiling_anew() -> Iterator[set[str]]:
    """Have JAX compile what it would read from its persistent cache.

    What was read from there does not always work once it is serialized again.

    **Returns:**

    A context manager that returns the names of JAX's events, as they happen.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    events: set[str] = set()

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        events.add(event.rsplit("/", 1)[-1])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        _enable_cache(False)
        yield events
    finally:
        _enable_cache(before)
        jax.monitoring.unregister_event_duration_listener(listen)


def _enable_cache(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    # JAX looks at its setting when it first compiles, and then no more.
    reset_cache()


def _default_folder() -> Path:
    """One for processors that can run each other's programs."""
    return platformdirs.user_cache_path("eqxshard") / "compiled" / processor_kind()


def processor_kind() -> str:
    """The same for processors that can run each other's programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    processor = features[0] if features else platform.processor() or platform.machine()
    return hashlib.sha256(processor.encode()).hexdigest()[:12]
