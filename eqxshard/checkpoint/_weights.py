"""A model's weights as safetensors, which other libraries read and write."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from ..distributed import fetch_whole, is_main_process
from ..sharding._placement import broadcast_prefix
from ._arrays import check_structure, partition_by_path, target_sharding

_T = TypeVar("_T")

#: The dtypes of safetensors, by the names it gives them.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


def save_weights(path: str | os.PathLike[str], model: PyTree) -> None:
    """Write a model's arrays to a safetensors file (Hugging Face).

    Each array is named by its path, such as `layers.0.weight`, and written whole, however
    it is sharded. With several processes, all must call this, and process 0 writes.

    **Arguments:**

    - `path`: the file, `*.safetensors`, which is replaced once everything is written. Its
        folder is created if necessary.
    - `model`: any PyTree. Leaves that are not arrays are left out.

    **Raises:**

    `OSError` if the file cannot be written; `ValueError` if two arrays have the same path,
    or one has a dtype that safetensors lacks, such as random keys.

    !!! Example

        ```python
        eqxshard.save_weights("model.safetensors", state.model)
        ```
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    leaves, _ = partition_by_path(model)
    unknown = [name for name, x in leaves.items() if str(x.dtype) not in _DTYPES.values()]
    if unknown:
        raise ValueError(
            f"{unknown[0]} has dtype {leaves[unknown[0]].dtype}, which safetensors does "
            "not have; cast it, or leave it out with equinox.filter."
        )
    # safetensors writes an array's memory as it is, whatever the strides.
    arrays = {name: np.asarray(fetch_whole(x), order="C") for name, x in leaves.items()}
    if not is_main_process():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(arrays, part)
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{os.fspath(path)!r} could not be written: {error}.") from error
    finally:
        part.unlink(missing_ok=True)


def load_weights(
    path: str | os.PathLike[str],
    like: _T,
    shardings: PyTree[Sharding | None] = None,
) -> _T:
    """Read a model's arrays from a safetensors file, each device only its own part.

    **Arguments:**

    - `path`: a file of [`eqxshard.save_weights`][], or another whose arrays have the
        same names and shapes.
    - `like`: a model of arrays or of `jax.ShapeDtypeStruct`s, such as from
        `equinox.filter_eval_shape`. Floating-point types may differ from the file's.
    - `shardings`: the shardings of the arrays, such as from [`eqxshard.shardings`][]; a
        prefix of `like`. Where it is `None`, arrays are sharded like those of `like`.

    **Returns:**

    A model like `like`, with the arrays of the file.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if it is not a safetensors
    file, or `like` does not have the same arrays: it names each that is missing,
    superfluous or of another shape.

    !!! Example

        ```python
        like = eqx.filter_eval_shape(make_model, key)
        model = eqxshard.load_weights(
            "model.safetensors", like, eqxshard.shardings(like, mesh, rule)
        )
        ```
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {os.fspath(path)!r}; give one that save_weights wrote."
        )
    wanted, static = partition_by_path(like)
    try:
        # Validates the header.
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read ({error}); it is damaged, or not a "
            "safetensors file."
        ) from error
    # It cannot read 8-bit floats into NumPy. A memory map can, and reads only parts.
    header, data = _map(path)
    unknown = [name for name, entry in header.items() if entry["dtype"] not in _DTYPES]
    if unknown:
        raise ValueError(
            f"{unknown[0]} in {os.fspath(path)!r} has dtype "
            f"{header[unknown[0]]['dtype']}, which JAX does not have; convert the file."
        )
    saved = {
        name: {"shape": entry["shape"], "dtype": _DTYPES[entry["dtype"]]}
        for name, entry in header.items()
    }
    check_structure(wanted, saved, os.fspath(path))
    arrays = []
    targets = broadcast_prefix(shardings, like)
    for (name, leaf), target in zip(wanted.items(), targets, strict=True):
        start, stop = header[name]["data_offsets"]
        whole = data[start:stop].view(jnp.dtype(saved[name]["dtype"]))
        arrays.append(_place(whole.reshape(leaf.shape), leaf, target))
    return static.combine(arrays)


def _map(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The header of a file, with an entry for each array, and the bytes after it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    # Mapped from the start, because the data may be empty, which cannot be mapped.
    return header, np.memmap(path, np.uint8, "r")[8 + length :]


def _place(whole: np.ndarray, leaf: Any, target: Sharding | None) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        # Copied, because the file may change.
        return np.array(whole[index], leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, target or target_sharding(leaf), part)
