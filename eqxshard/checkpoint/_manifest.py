"""The two files beside the arrays of a checkpoint: its description, and its checksums.

The description is readable, and says what is there. The checksums, written last, mark a
folder as complete on any file system. (Renaming a finished folder would not do on object
stores, which cannot rename.) They are the SHA-256 of each file, which
`sha256sum -c checksums.txt` verifies, too. Large files of arrays, whose chunks carry
checksums of their own, are listed by size: each process verifies what it reads of them.
"""

import hashlib
import math
import operator
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._errors import UsageError, UsageTypeError
from ..sharding._files import (
    is_remote,
    odd_file,
    parse_json,
    read_bytes,
    sync,
    with_retries,
    write_at_once,
)
from ..sharding._leaves import is_key
from ._arrays import DamageError

# The description

#: The file in a checkpoint's folder.
DESCRIPTION = "description.json"
#: The format of checkpoints. A description that does not say is of format 1.
_FORMAT = 2


class FormatError(UsageError):
    """A checkpoint is of a later version of eqxshard, in a format that is unknown here."""


def describe(
    step: int,
    leaves: Mapping[str, Any],
    loader: Any,
    metrics: Mapping[str, float],
    callbacks: Mapping[str, Any],
    renamed: Sequence[Mapping[str, str | None]] = (),
) -> dict[str, Any]:
    """Describe the state of a step, as JSON values.

    - `format`, `version`: the format of the checkpoint, and the version of eqxshard.
    - `step`: the number of steps taken.
    - `metrics`: the metrics of this state, finite values only.
    - `loader`: the loader's position, as [`eqxshard.Loader.state`][] returns it, if there
        was a loader that has one.
    - `mesh`: the sizes of the mesh's axes.
    - `leaves`: for each array, by path, its shape, dtype and spec.
    - `callbacks`: the states of the run's callbacks, by name.
    - `renamed`: the renames of restores since the run began, a dict for each.
    """
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise UsageTypeError(
                f"{path} is a {type(leaf).__name__}, not an array on devices; place what "
                "is saved with filter_shard."
            )
    placed = [leaf.sharding for leaf in leaves.values()]
    meshes = [each.mesh.shape for each in placed if isinstance(each, NamedSharding)]
    return {
        "format": _FORMAT,
        "version": _version(),
        "step": step,
        # JSON has no infinity and no nan.
        "metrics": {k: float(v) for k, v in metrics.items() if math.isfinite(v)},
        "loader": dict(loader.state()) if hasattr(loader, "state") else None,
        "mesh": dict(meshes[0]) if meshes else {},
        "leaves": {path: array_metadata(leaf) for path, leaf in leaves.items()},
        "callbacks": dict(callbacks),
        "renamed": list(renamed),
    }


def parse_description(text: str | bytes) -> dict[str, Any]:
    """Read a description; raise `ValueError` if it is not one, or is of a later format."""
    try:
        found = parse_json(text)
        if (number := found.get("format", 1)) > _FORMAT:
            raise FormatError(
                f"it was written by eqxshard {found['version']}, in format {number}, and "
                f"this is eqxshard {_version()}, which reads formats up to {_FORMAT}; "
                "update eqxshard, or use another folder."
            )
        # Each of these raises an error if it finds another type than it needs.
        for leaf in found["leaves"].values():
            abstract_array(leaf)
        for value in (found["step"], *found["metrics"].values(), *found["mesh"].values()):
            math.isfinite(value)
        # Earlier versions could not rename.
        renamed = found.setdefault("renamed", [])
        for part in (found["loader"] or {}, found["callbacks"], *renamed):
            part.keys()
    except FormatError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{DESCRIPTION} was not written by eqxshard ({error!r})") from None
    return found


def _version() -> str:
    return sys.modules["eqxshard"].__version__


def array_metadata(leaf: Array) -> dict[str, Any]:
    """The shape, dtype and spec of an array, as JSON values."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    described = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
    }
    return described | ({"impl": str(jax.random.key_impl(leaf))} if is_key(leaf) else {})


def abstract_array(described: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `array_metadata` describes."""
    dtype = described["dtype"]
    if "impl" in described:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=described["impl"])).dtype
    elif not any(jnp.issubdtype(jnp.dtype(dtype), kind) for kind in (jnp.number, bool)):
        raise UsageTypeError(f"{dtype!r} is not the dtype of an array")
    return jax.ShapeDtypeStruct(tuple(map(operator.index, described["shape"])), dtype)


# The checksums

#: The file that marks a folder as complete, with a line for every other file.
CHECKSUMS = "checksums.txt"
#: The files that TensorStore verifies when it reads them: the chunks of each process, and
#: those that earlier versions wrote to object stores.
_VERIFIED_WHEN_READ = re.compile(r"arrays/|state/ocdbt\.process_\d+_crc32c\w*/d/")
#: Files that are no larger are hashed nevertheless.
_SMALL_BYTES = 2**20


def write_checksums(folder: Any) -> None:
    """Mark a folder as complete, as it is now.

    **Arguments:**

    - `folder`: an `etils.epath.Path`.
    """
    marks = _mark(_files(folder))
    lines = [f"{mark}  {name}\n" for name, mark in sorted(marks.items())]
    # The number of files, because a list that was cut short would look whole.
    write_at_once(folder / CHECKSUMS, "".join([f"# {len(lines)} files\n", *lines]))


def invalidate(folder: Any) -> None:
    """Mark a folder as incomplete, before removing it, which takes a while."""
    (folder / CHECKSUMS).unlink(missing_ok=True)
    if not is_remote(folder):
        # Otherwise a loss of power could undo this, but not what is removed next.
        sync(folder)


def is_complete(folder: Any) -> bool:
    """True if a folder was completed, whatever has happened to it since."""
    # Not `exists`, which takes an error of the file system for absence.
    try:
        return any(path.name == CHECKSUMS for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def verify(folder: Any) -> None:
    """Raise `DamageError` if a folder differs from when it was completed.

    Of large files of arrays, the sizes are compared; their chunks are verified when they
    are read. Files that were added do not count, such as notes of the user's. A file that
    cannot be read is tried again; if that fails, its own error is raised.
    """
    if (odd := with_retries(partial(odd_file, folder))) is not None:
        raise DamageError(odd)
    try:
        written = _parse(with_retries(partial(read_bytes, folder / CHECKSUMS)).decode())
    except FileNotFoundError:
        raise DamageError(f"{CHECKSUMS} is missing") from None
    except ValueError:
        raise DamageError(f"{CHECKSUMS} is not a list of checksums") from None
    files = with_retries(partial(_files, folder))
    found = _mark({k: v for k, v in files.items() if k in written}, written)
    for name in sorted(written):
        if name not in found:
            raise DamageError(f"{name} is missing")
        if found[name] != written[name]:
            raise DamageError(f"{name} has changed since it was written")


def _parse(text: str) -> dict[str, str]:
    """The mark of each file in a list; `ValueError` if the list is not whole."""
    # Lists of earlier versions do not begin with the number of files.
    count = re.match(r"# (\d+) files\n", text)
    marks = (
        line.split("  ", 1) for line in text[count.end() if count else 0 :].splitlines()
    )
    written = {name: mark for mark, name in marks}
    if not written or (count and int(count[1]) != len(written)):
        raise ValueError
    return written


def _mark(files: Mapping[str, Any], written: Mapping[str, str] = {}) -> dict[str, str]:
    """The mark of each file in the list: its digest, or `#` and its size.

    **Arguments:**

    - `files`: the files by name.
    - `written`: the marks of an earlier list, whose kinds are kept.
    """
    # One core does a gigabyte a second.
    with ThreadPoolExecutor() as threads:
        reads = (
            partial(with_retries, partial(_mark_of, name, file, written.get(name, "#")))
            for name, file in files.items()
        )
        return dict(zip(files, threads.map(lambda read: read(), reads)))


def _mark_of(name: str, file: Any, written: str) -> str:
    # A file that was hashed is hashed again. Lines with sizes are comments for sha256sum.
    if written.startswith("#") and _VERIFIED_WHEN_READ.match(name):
        size = file.stat().length
        if size > _SMALL_BYTES:
            return f"#{size}"
    return _digest(file)


def _files(folder: Any, prefix: str = "") -> dict[str, Any]:
    """Every file in a folder but that of the checksums, by its path there."""
    files: dict[str, Any] = {}
    for path in folder.iterdir():
        name = prefix + path.name
        if path.is_dir():
            files |= _files(path, f"{name}/")
        elif name != CHECKSUMS:
            files[name] = path
    return files


def _digest(file: Any) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
