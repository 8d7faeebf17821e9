"""A model's arrays as those of other libraries, written to one file or several."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..distributed import broadcast_from_first, fetch_whole, is_main_process
from ._weight_files import DTYPES, index_of
from ._weight_names import Names, Rename, Transform, find_names


def outgoing(
    leaves: Mapping[str, jax.Array], rename: Rename | None, transform: Transform | None
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays to write and their names, each fetched from its devices when it is due.

    **Arguments:**

    - `leaves`: the model's arrays by path.
    - `rename`, `transform`: as for [`eqxshard.save_weights`][].

    **Raises:**

    `ValueError` or `TypeError`, before anything is fetched, if a dtype or the names are
    wrong, and later if the transform is.
    """
    found = [names for names in find_names(leaves, rename).values() if names is not None]
    path_of: dict[str, str] = {}
    for names in found:
        check_dtype(names.path, leaves[names.path].dtype)
        for name in (name for numbers in names.each() for name in names.of(numbers)):
            if name in path_of:
                raise ValueError(
                    f"rename gives {path_of[name]} and {names.path} the same name, {name}; "
                    "give each array its own, or None to leave it out."
                )
            path_of[name] = names.path
    return (
        named
        for names in found
        for numbers in names.each()
        for named in _transformed(names, numbers, leaves[names.path], transform)
    )


def write_weights(
    path: Path, arrays: Iterable[tuple[str, np.ndarray]], max_bytes: int | None
) -> None:
    """Write arrays to a file or, where they are too large for one, to several.

    Process 0 writes; the others only take the arrays, and raise if it fails.

    **Arguments:**

    - `path`: the file. Several have its name with numbers, and an index beside them.
    - `arrays`: the arrays with their names. No more of them are kept than go into a file.
    - `max_bytes`: how many bytes of arrays a file may have, or `None` for one file. An
        array that is larger has a file to itself.

    **Raises:**

    `OSError` if a file cannot be written. What was at `path` before is still there then.
    """
    arrays, error = iter(arrays), None
    if is_main_process():
        try:
            _write(path, arrays, max_bytes)
        except Exception as first:
            error = first
    if jax.process_count() > 1:
        # All processes fetch each array together, even if process 0 cannot write it.
        try:
            for _ in arrays:
                pass
        except Exception as other:
            error = error or other
    fault = None if error is None else str(error) or type(error).__name__
    # So nobody goes on before the file is there, either.
    fault = broadcast_from_first(fault)
    if error is not None:
        raise error
    if fault is not None:
        raise OSError(f"process 0 could not write {os.fspath(path)!r}: {fault}")


def _write(
    path: Path, arrays: Iterable[tuple[str, np.ndarray]], max_bytes: int | None
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written: list[tuple[Path, list[str]]] = []
    few: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        part = path.with_name(f".{path.name}.{len(written)}.part")
        written.append((part, [*few]))
        _save(path, part, few)
        few.clear()

    try:
        for name, array in arrays:
            if few and max_bytes is not None and size + array.nbytes > max_bytes:
                flush()
                size = 0
            few[name] = array
            size, total = size + array.nbytes, total + array.nbytes
        flush()
        _replace(path, written, total)
    finally:
        for part, _ in written:
            part.unlink(missing_ok=True)


def check_dtype(path: str, dtype: Any) -> None:
    """Raise `ValueError` if safetensors cannot hold arrays of a dtype."""
    if str(dtype) not in DTYPES.values():
        raise ValueError(
            f"{path} has dtype {dtype}, which safetensors does not have; cast it, or leave "
            "it out with equinox.filter."
        )


def _transformed(
    names: Names, numbers: tuple[int, ...], leaf: jax.Array, transform: Transform | None
) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of one layer, with their names."""
    # A copy, of which the array itself keeps none on the host.
    part = _layer(leaf, [*map(np.array, numbers)]) if numbers else jnp.copy(leaf)
    value = names.apply(transform, fetch_whole(part))
    arrays = value if names.is_list else [value]
    if not isinstance(arrays, list | tuple) or len(arrays) != len(names.names):
        count = len(arrays) if isinstance(arrays, list | tuple) else "one array, not a list"
        raise ValueError(
            f"{names.path} has {len(names.names)} names in the file and {count} of arrays; "
            "write a transform= that returns a list with one for each name."
        )
    for name, array in zip(names.of(numbers), arrays, strict=True):
        # safetensors writes an array's memory as it is, whatever the strides.
        array = np.asarray(array, order="C")
        check_dtype(names.path, array.dtype)
        yield name, array


@jax.jit
def _layer(leaf: jax.Array, numbers: list[jax.Array]) -> jax.Array:
    """One layer of stacked layers, so that only that one is gathered."""
    for number in numbers:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return leaf


def _save(path: Path, part: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # safetensors makes files that only their owner can read; the umask is for us to honour.
    part.touch()
    mode = part.stat().st_mode
    try:
        # What Hugging Face's libraries write, and some insist on.
        save_file(arrays, part, metadata={"format": "pt"})
        part.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{os.fspath(path)!r} could not be written: {error}.") from error


def _replace(path: Path, written: list[tuple[Path, list[str]]], total: int) -> None:
    """Give files that are written their names."""
    index = index_of(path)
    if len(written) == 1:
        new = [path]
    else:
        new = [
            path.with_name(f"{path.stem}-{i:05}-of-{len(written):05}{path.suffix}")
            for i in range(1, len(written) + 1)
        ]
        pairs = zip(new, written, strict=True)
        file_of = {name: file.name for file, (_, names) in pairs for name in names}
        content = {"metadata": {"total_size": total}, "weight_map": file_of}
        part = index.with_name(f".{index.name}.part")
        written.append((part, []))
        part.write_text(json.dumps(content, indent=2) + "\n")
        new.append(index)
    for (part, _), file in zip(written, new, strict=True):
        part.replace(file)
    # What would be read in the place of the new ones.
    for file in {path, index} - {*new}:
        file.unlink(missing_ok=True)
