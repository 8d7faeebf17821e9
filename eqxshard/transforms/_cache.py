"""Compiled programs that outlive the process."""

import contextlib
import hashlib
import logging
import os
import platform
import stat
import time
import zlib
from pathlib import Path, PurePath

import jax
import platformdirs

from ..sharding._paths import as_text, is_remote, local_path

_LOG = logging.getLogger(__name__)

#: Its time is that until which entries of a folder are known to be whole.
_CHECKED = ".eqxshard-checked"
#: No program takes longer to write.
_WRITING_SECONDS = 60.0


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
    given = directory or jax.config.values["jax_compilation_cache_dir"]
    if given and is_remote(given):
        from etils import epath  # Which JAX reads and writes it with.

        # The store knows who may write to it.
        _keep_all_in(as_text(given))
        return epath.Path(as_text(given))
    folder = local_path(given or _default_folder(), "the folder of compiled programs")
    fault = _fault(folder)
    if fault is not None:
        _LOG.warning(
            "compiled programs are not cached in %s: %s; choose a folder that only you, or "
            "your group, can write to.",
            folder,
            fault,
        )
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    _remove_damaged(folder)
    _keep_all_in(str(folder))
    return folder


def _keep_all_in(folder: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    # JAX's defaults leave out what compiles in less than a second, as most of a small
    # model's start does.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _fault(folder: Path) -> str | None:
    """Why others could put programs into a folder, if they could."""
    if not hasattr(os, "getuid"):
        return None
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    for place in (folder.resolve(), *folder.resolve().parents):
        try:
            about = place.stat()
        except OSError:
            continue  # JAX warns that it cannot be written.
        if about.st_uid not in (0, os.getuid()):
            return f"{place} belongs to another user"
        # In a sticky folder, such as /tmp, others cannot replace a folder of one's own.
        sticky = place != folder.resolve() and about.st_mode & stat.S_ISVTX
        if about.st_mode & stat.S_IWOTH and not sticky:
            return f"all users may write to {place}"
    return None


def _remove_damaged(folder: Path) -> None:
    """Remove entries that a process was killed in the middle of writing.

    JAX does not replace them: it would warn, and compile, at every start from now on.
    """
    checked = folder / _CHECKED
    now, damaged = time.time(), 0
    try:
        before = checked.stat().st_mtime if checked.exists() else 0.0
        for entry in folder.glob("*-cache"):
            # Another process may be writing the newest ones.
            is_new = before <= entry.stat().st_mtime < now - _WRITING_SECONDS
            if is_new and not _is_whole(entry.read_bytes()):
                entry.unlink()
                damaged += 1
        checked.touch()
        os.utime(checked, (now, now - _WRITING_SECONDS))
    except OSError:
        return  # As above; or another process removed one first.
    if damaged:
        _LOG.warning(
            "the compilation cache %s had incomplete entries (%d); they are compiled "
            "again.",
            folder,
            damaged,
        )


def _is_whole(data: bytes) -> bool:
    if not data.startswith(b"\x78"):
        return bool(data)  # Not of zlib, but of zstandard, which JAX uses if it is there.
    stream = zlib.decompressobj()
    try:
        stream.decompress(data)
    except zlib.error:
        return False
    return stream.eof


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
