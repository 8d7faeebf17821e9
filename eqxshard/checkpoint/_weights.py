"""A model's weights in files that other libraries read and write (safetensors)."""

import functools
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._errors import UsageError, UsageFileError, UsageOSError
from ..distributed import broadcast_from_first, fetch_whole, is_main_process
from ..sharding._files import local_path, open_file, read_json, sync
from ..sharding._leaves import as_weak_as
from ..sharding._text import first_few
from ..training._donation import check_state_not_donated
from ..training._state import refuse_state
from ._arrays import partition_by_path, place_parts, target_sharding
from ._weight_names import (
    Names,
    Rename,
    Transform,
    WeightsReport,
    find_names,
    match_weights,
    read_part,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
#: The dtypes of safetensors, by the names it gives them.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

#: For each array of a file: its path in the model, its name, and its values.
_Arrays = Iterable[tuple[str, str, np.ndarray]]


def save_weights(
    path: str | os.PathLike[str],
    model: PyTree,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
) -> None:
    r"""Write a model's arrays to a safetensors file (Hugging Face).

    Each array is named by its path, such as `layers.0.weight`, and written whole, however
    it is sharded. The arrays are fetched and written one by one, so the host needs memory
    for one array (one layer of it for a `*`), not for the model. With several processes,
    all must call this, and process 0 writes.

    Other libraries have other names and layouts: `rename` and `transform` are the inverse
    of those for [`eqxshard.load_weights`][].

    **Arguments:**

    - `path`: the file, `*.safetensors`, which is replaced once everything is written. Its
        folder is created if necessary.
    - `model`: any PyTree. Leaves that are not arrays are left out.
    - `rename`: from the path of an array in the model to its name in the file: a function,
        or a mapping from regular expressions to replacements. `None` leaves the array
        out. A `*` stands for the numbers from 0 along the first dim: under `h.*.weight`
        each layer of stacked layers is an array of its own. A function may also return a
        list of names, for an array that `transform` divides.
    - `transform`: `transform(path, array)` changes an array, one layer for a `*`, before
        it is written; where there is a list of names, it returns a list of arrays. It is
        also called once before with zeros, for the shapes.

    **Raises:**

    `OSError` if a file cannot be written; `ValueError` if an index of other weights is
    beside it, such as `model.safetensors.index.json`, two arrays have the same path or
    name, one has a dtype that safetensors lacks, such as random keys, or the model was
    donated to a step; `TypeError` if `rename` returns something other than names.

    !!! Example

        ```python
        eqxshard.save_weights("model.safetensors", state.model)
        ```
    """
    check_state_not_donated(model)
    file = local_path(path, "the file of weights")
    leaves, _ = partition_by_path(model)
    found = [*find_names(leaves, rename, transform).values()]
    for names in found:
        _check_dtype(names.path, leaves[names.path].dtype)
    # Large numbers first, so that each array begins at a multiple of its number's size.
    found.sort(key=lambda names: (-leaves[names.path].dtype.itemsize, names.path))
    header = _header(_transformed(found, leaves, _zeros))
    arrays = _transformed(found, leaves, _fetch)
    # An index would be read instead of the file, and is not ours to remove.
    index = file.with_name(f"{file.name}.index.json")
    if broadcast_from_first(os.path.lexists(index)):
        raise UsageError(
            f"{os.fspath(path)!r} has an index of other weights beside it, {index.name}; "
            "move that away, or give another path."
        )
    error = None
    try:
        if is_main_process():
            _write(file, header, arrays)
    except OSError as first:
        error = first
    if jax.process_count() > 1:
        # Each array is fetched by all processes, even if process 0 cannot write it.
        for _ in arrays:
            pass
    fault = broadcast_from_first(None if error is None else error.strerror or str(error))
    if fault is not None:
        raise UsageOSError(
            f"{os.fspath(path)!r} could not be written: {fault}; give another path, or "
            "make room."
        ) from error


def load_weights(
    path: str | os.PathLike[str],
    like: _T,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
    partial: bool = False,
    ignore: str | Sequence[str] = (),
) -> _T:
    r"""Read a model's arrays from a file, each device only its own part.

    The file is one of [safetensors](https://huggingface.co/docs/safetensors), and its name
    ends in `.safetensors`. Files of `torch.save` and of Equinox are converted first, as the
    guide shows.

    **Arguments:**

    - `path`: a file; or the index of several, such as `model.safetensors.index.json`; or
        the folder of either.
    - `like`: a model of arrays or of `jax.ShapeDtypeStruct`s, such as the `model` of
        [`eqxshard.abstract_state`][], whose shardings say what each device reads.
        Floating-point types may differ from the file's.
    - `rename`: leads from an array's path in the model, such as `blocks.0.up.weight`, to
        its name in the file: a function of the path; or a mapping from regular
        expressions to replacements, which are applied in turn, as by `re.sub`.
        `None` instead of a name leaves the array as it is in `like`. A `*` in a name
        stands for the numbers from 0: the arrays `h.*.up.weight` are stacked along a
        first dim, as in the layers for [`eqxshard.scan_layers`][]. A function may also
        return a list of names, for arrays that `transform` joins.
    - `transform`: `transform(path, array)` changes an array of the file before it is
        stacked, given the path in the model; where there is a list of names, it gets the
        list of arrays, and returns one. The arrays are NumPy views of the file, so
        transposing, slicing and splitting read nothing. (Arithmetic and joining read the
        arrays of one layer whole into the host's memory.) It is also called once before,
        for the shape.
    - `partial`: let the model, the file, or both have arrays that the other does not have.
        They are named in a warning in the log.
    - `ignore`: a regular expression, or several, for the names of arrays that the file may
        have and the model does not need, such as the causal masks of GPT-2. Other arrays
        that only the file has are still an error.

    **Returns:**

    A model like `like`, with the arrays of the file. Those that are not read stay as they
    are in `like`.

    **Raises:**

    `FileNotFoundError` if a file is missing; `ValueError` if one is damaged or of
    another format, or the arrays are not those of `like`: it names those that are
    missing, superfluous or of another shape. `TypeError` if `like` is a whole state, or
    `rename` returns something other than names.

    !!! Example

        ```python
        state = eqxshard.init_state(
            make_model,
            optim,
            key=key,
            mesh=mesh,
            rule=rule,
            load=lambda like: eqxshard.load_weights("model.safetensors", like),
        )
        ```
    """
    refuse_state(like, "load_weights")
    wanted, static = partition_by_path(like)
    arrays = _map_weights(Path(path))
    report, fitting = match_weights(arrays, wanted, rename, transform, ignore)
    faults = [*report.different.values()]
    if not partial:
        missing, unused = report.missing.items(), report.unused.items()
        faults += [
            f"{name} is missing in the file (as {theirs})" for name, theirs in missing
        ]
        faults += [f"{theirs} {what} is only in the file" for theirs, what in unused]
    if faults:
        raise UsageError(
            f"{os.fspath(path)} does not fit this model: {first_few(faults, '; ')}. Find "
            "the right rename= and transform= with compare_weights; partial=True leaves "
            "out arrays that only one of them has, ignore= some that only the file has."
        )
    if (left_out := [*report.missing, *report.unused]) and is_main_process():
        _log.warning(
            "%s: %d of the model's %d arrays are read; not found, or not used: %s.",
            *(os.fspath(path), len(fitting), len(wanted), first_few(left_out)),
        )
    loaded = []
    for name, leaf in wanted.items():
        if name in fitting:
            read = functools.partial(read_part, arrays, fitting[name], dtype=leaf.dtype)
            placed = place_parts(read, leaf.shape, target_sharding(leaf))
            leaf = as_weak_as(placed, leaf)
        loaded.append(leaf)
    return static.combine(loaded)


def compare_weights(
    path: str | os.PathLike[str],
    like: PyTree,
    *,
    rename: Rename | None = None,
    transform: Transform | None = None,
    ignore: str | Sequence[str] = (),
) -> WeightsReport:
    """Compare the names and shapes of a file's arrays with those of a model.

    Nothing is loaded, so this is the way to find the right `rename` and `transform`.

    **Arguments:**

    - `path`, `like`, `rename`, `transform`, `ignore`: as for [`eqxshard.load_weights`][].

    **Returns:**

    An [`eqxshard.checkpoint.WeightsReport`][].

    **Raises:**

    As [`eqxshard.load_weights`][] does, but not if the arrays are not those of `like`.

    !!! Example

        ```python
        like = eqx.filter_eval_shape(make_model, key)
        print(eqxshard.checkpoint.compare_weights("model.safetensors", like))
        ```
    """
    refuse_state(like, "compare_weights")
    wanted, _ = partition_by_path(like)
    arrays = _map_weights(Path(path))
    return match_weights(arrays, wanted, rename, transform, ignore)[0]


def _transformed(
    found: Iterable[Names],
    leaves: Mapping[str, jax.Array],
    fetch: Callable[[jax.Array, tuple[int, ...]], np.ndarray],
) -> Iterator[tuple[str, str, np.ndarray]]:
    for names in found:
        for numbers, layer in names.layers.items():
            value = names.apply(fetch(leaves[names.path], numbers))
            arrays = value if names.is_list else [value]
            if len(arrays) != len(layer):
                raise UsageError(
                    f"{names.path} has {len(layer)} names in the file; write a transform= "
                    "that returns a list with one array for each."
                )
            for name, array in zip(layer, arrays, strict=True):
                yield names.path, name, np.asarray(array)


def _zeros(leaf: jax.Array, numbers: tuple[int, ...]) -> np.ndarray:
    """Zeros of the shape and dtype of one layer, which take no memory."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape[len(numbers) :])


def _fetch(leaf: jax.Array, numbers: tuple[int, ...]) -> np.ndarray:
    """One layer on the host, fetched from a copy: an array keeps fetched values there."""
    return fetch_whole(
        _layer(leaf, [*map(np.array, numbers)]) if numbers else jnp.copy(leaf)
    )


@jax.jit
def _layer(leaf: jax.Array, numbers: list[jax.Array]) -> jax.Array:
    """One layer of stacked layers, so that only that one is gathered."""
    for number in numbers:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return leaf


def _header(arrays: _Arrays) -> dict[str, Any]:
    """The header of a file: the dtype, the shape and the place of each array."""
    # Hugging Face's libraries write this, and some insist on it.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for path, name, array in arrays:
        if name in header:
            raise UsageError(
                f"rename gives {path} and another array the name {name}; give each its "
                "own, or None to leave it out."
            )
        _check_dtype(path, array.dtype)
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _CODES[str(array.dtype)],
            "shape": [*array.shape],
            "data_offsets": [begin, end],
        }
    return header


def _check_dtype(path: str, dtype: Any) -> None:
    if str(dtype) not in _CODES:
        raise UsageError(
            f"{path} has dtype {dtype}, which safetensors does not have; cast it, or leave "
            "it out with equinox.filter."
        )


def _write(path: Path, header: dict[str, Any], arrays: _Arrays) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # A name of its own: another program may write the same weights at this moment.
    part = path.with_name(f".eqxshard-{uuid.uuid4().hex}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, name, array in arrays:
                assert [*array.shape] == header[name]["shape"], "its shape has changed"
                file.write(np.ravel(array).view(np.uint8).data)
        # Otherwise a loss of power could leave neither this file nor the one before it.
        sync(part)
        part.replace(path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


# Files of safetensors


def _map_weights(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file or folder of weights, by name.

    They are memory-mapped: nothing is read yet.

    **Arguments:**

    - `path`: as for [`eqxshard.load_weights`][].

    **Raises:**

    `FileNotFoundError` if there is nothing at `path`, `ValueError` if it cannot be read.
    """
    file = _find_in(path) if path.is_dir() else path
    files, arrays = [file], dict[str, np.ndarray]()
    try:
        if file.name.endswith(".index.json"):
            names = {*read_json(file)["weight_map"].values()}
            files = [file.with_name(name) for name in sorted(names)]
        for file in files:
            arrays |= dict(_map_file(file))
    except FileNotFoundError:
        raise
    # A damaged file, or one made to do harm, can raise anything.
    except Exception as error:
        said = str(error).split("\n")[0]
        raise UsageError(
            f"{os.fspath(file)!r} cannot be read ({type(error).__name__}: {said}); fetch "
            "it again, or convert it to safetensors."
        ) from error
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _find_in(folder: Path) -> Path:
    """The one file, or index of several, in a folder."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    found = indices or sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise UsageFileError(
            f"{os.fspath(folder)!r} has {len(found)} files to choose from; give the path "
            "of one, or a folder with one *.safetensors.index.json or *.safetensors."
        )
    return found[0]


def _map_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of one file."""
    from safetensors import safe_open

    # It must be neither a FIFO nor a device.
    open_file(path).close()
    if path.suffix != ".safetensors":
        raise UsageError("its name must end in .safetensors")
    # Validates the header.
    with safe_open(path, "np"):
        pass
    # That cannot read 8-bit floats into NumPy. A memory map can, and reads only parts.
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    # Mapped from the start, because the data may be empty, which cannot be mapped.
    data = np.asarray(np.memmap(path, np.uint8, "r"))[8 + length :]
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = jnp.dtype(_DTYPES[entry["dtype"]])
        yield name, data[start:stop].view(dtype).reshape(entry["shape"])
