"""Weights as safetensors, which other libraries read and write."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from ._leaves import check_same, place_of, split_by_path
from .distributed import is_first, on_host
from .sharding import spread

_T = TypeVar("_T")

#: What safetensors calls the types.
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
    """Write a model's arrays to a file of safetensors (Hugging Face).

    Each array is named by its path, such as `layers.0.weight`, and written whole,
    wherever its parts lie. Of several processes, all must call it, and the first writes.

    **Arguments:**

    - `path`: the file, `*.safetensors`. It is replaced as a whole, once all is written;
        its folder is made where it is missing.
    - `model`: any PyTree. What is no array is left out.

    **Raises:**

    `OSError` if the file cannot be written; `ValueError` if two arrays have the same path,
    or one is of a type that safetensors does not have, such as random keys.

    !!! Example

        ```python
        eqxshard.save_weights("model.safetensors", state.model)
        ```
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(path)
    leaves, _ = split_by_path(model)
    unknown = [name for name, x in leaves.items() if str(x.dtype) not in _DTYPES.values()]
    if unknown:
        raise ValueError(
            f"{unknown[0]} is of type {leaves[unknown[0]].dtype}, which safetensors does "
            "not have; cast it, or leave it out with equinox.filter."
        )
    # safetensors writes an array's memory as it lies.
    arrays = {name: np.asarray(on_host(x), order="C") for name, x in leaves.items()}
    if not is_first():
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
    """Read a model's arrays from a safetensors file, each device its own part.

    **Arguments:**

    - `path`: a file of [`eqxshard.save_weights`][], or another whose arrays have the
        same names and shapes.
    - `like`: a model of arrays or of `jax.ShapeDtypeStruct`s, such as from
        `equinox.filter_eval_shape`. Floating-point types may be others than in the file.
    - `shardings`: where the arrays are to be, such as from [`eqxshard.shardings`][]; a
        prefix of `like`. Where it is `None`, they go where those of `like` are.

    **Returns:**

    A model like `like`, with the arrays of the file.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if it is no safetensors
    file, or `like` has other arrays: it names each that is missing, that is too many, or
    that has another shape.

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
    wanted, skeleton = split_by_path(like)
    try:
        # It checks all that a header can have wrong.
        with safe_open(path, "np"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read ({error}); it is damaged, or no "
            "safetensors file."
        ) from error
    # But it does not read 8-bit floats into NumPy: a memory map does, and only parts of it.
    header, data = _map(path)
    unknown = [name for name, entry in header.items() if entry["dtype"] not in _DTYPES]
    if unknown:
        raise ValueError(
            f"{unknown[0]} in {os.fspath(path)!r} is of type "
            f"{header[unknown[0]]['dtype']}, which JAX does not have; convert the file."
        )
    saved = {
        name: {"shape": entry["shape"], "dtype": _DTYPES[entry["dtype"]]}
        for name, entry in header.items()
    }
    check_same(wanted, saved, os.fspath(path))
    arrays = []
    for (name, leaf), there in zip(wanted.items(), spread(shardings, like), strict=True):
        start, stop = header[name]["data_offsets"]
        whole = data[start:stop].view(jnp.dtype(saved[name]["dtype"]))
        arrays.append(_place(whole.reshape(leaf.shape), leaf, there))
    return skeleton.merge(arrays)


def _map(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """What the header of a file says of each array, and the bytes after it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    # Files may end there, and what is empty cannot be mapped.
    return header, np.memmap(path, np.uint8, "r")[8 + length :]


def _place(whole: np.ndarray, leaf: Any, there: Sharding | None) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        # A copy, as the file may change.
        return np.array(whole[index], leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, there or place_of(leaf), part)
