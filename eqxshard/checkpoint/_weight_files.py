"""Files of weights, whatever wrote them, as memory-mapped arrays by name."""

import json
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..sharding._files import open_file, read_json
from ..sharding._leaves import is_array, leaf_path
from ..sharding._text import comma_list
from ._torch_files import map_torch

#: The dtypes of safetensors, by the names it gives them.
DTYPES = {
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

#: What the name of a file of weights ends with, in the order of preference in a folder.
_ENDINGS = (".safetensors.index.json", ".safetensors", ".bin.index.json")
_ENDINGS += (".bin", ".pt", ".pth", ".eqx")
#: How long a line of JSON before arrays may be.
_LINE_BYTES = 2**16
_ZIP, _NPY = b"PK\3\4", b"\x93NUMPY"
#: The first bytes of `torch.save` before version 1.6, which wrote a series of pickles.
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def map_weights(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a file or folder of weights, by name. Nothing of them is read yet.

    **Arguments:**

    - `path`: as for [`eqxshard.load_weights`][].
    - `like`: the model, whose paths name the arrays of an Equinox file.

    **Raises:**

    `FileNotFoundError` if there is nothing at `path`, `ValueError` if it cannot be read.
    """
    if path.is_dir():
        path = _choose(path)
    if not path.exists() and index_of(path).is_file():
        path = index_of(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{os.fspath(path)!r} does not exist; give a file of weights, or the folder of "
            "one."
        )
    if path.name.endswith(".index.json"):
        return _map_index(path, like)
    return _map_file(path, like)


def _map_file(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of one file, by what it begins with."""
    with open_file(path) as file:
        start = file.read(_LINE_BYTES)
    if path.suffix == ".safetensors":
        return _map_safetensors(path)
    if start.startswith(_ZIP):
        return map_torch(path)
    if start[_npy_start(start) :].startswith(_NPY):
        return _map_equinox(path, like)
    if start[8:9] == b"{":
        return _map_safetensors(path)
    if start.startswith(_OLD_TORCH):
        raise ValueError(
            f"{os.fspath(path)!r} has the format of torch before 1.6; load it with torch "
            "and write it with torch.save again, or with safetensors."
        )
    raise ValueError(
        f"{os.fspath(path)!r} is not a file of safetensors, torch.save or "
        "equinox.tree_serialise_leaves, or it is damaged; fetch it again."
    )


def index_of(path: Path) -> Path:
    """The index of the files that stand for one."""
    return path.with_name(f"{path.name}.index.json")


def _choose(folder: Path) -> Path:
    """The one file, or index of several, in a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for ending in _ENDINGS:
        found = [name for name in names if name.endswith(ending)]
        if len(found) == 1:
            return folder / found[0]
        if found:
            raise ValueError(
                f"{os.fspath(folder)!r} has {len(found)} files *{ending} "
                f"({comma_list(found[:3])}{', ...' if found[3:] else ''}) and no index of "
                "them; give one of the files."
            )
    raise FileNotFoundError(
        f"there are no weights in {os.fspath(folder)!r}; give a file, or a folder with one "
        f"that ends in {comma_list(_ENDINGS)}."
    )


def _map_index(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of all files that an index names."""
    try:
        file_of = read_json(path)["weight_map"]
        files = sorted(set(file_of.values()))
        outside = [name for name in files if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is not an index of weights, or is damaged "
            f"({type(error).__name__}: {error}); fetch it again."
        ) from error
    if outside:
        raise ValueError(
            f"{os.fspath(path)!r} names {outside[0]!r}, which is not beside it; put all "
            "files in one folder."
        )
    missing = [name for name in files if not os.path.isfile(path.parent / name)]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise FileNotFoundError(
            f"{os.fspath(path)!r} names {len(files)} files, and {missing[0]}{more} cannot "
            "be found beside it; fetch all of them."
        )
    arrays: dict[str, np.ndarray] = {}
    for name in files:
        arrays |= _map_file(path.parent / name, like)
    lost = [name for name in file_of if name not in arrays]
    if lost:
        raise ValueError(
            f"{os.fspath(path)!r} says that {lost[0]} is in {file_of[lost[0]]}, and it is "
            "not; fetch the files again, all of one version."
        )
    return arrays


def _map_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

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
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    # Mapped from the start, because the data may be empty, which cannot be mapped.
    data = np.asarray(np.memmap(path, np.uint8, "r"))[8 + length :]
    arrays = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{name} in {os.fspath(path)!r} has dtype {entry['dtype']}, which JAX does "
                "not have; convert the file."
            )
        start, stop = entry["data_offsets"]
        flat = data[start:stop].view(jnp.dtype(DTYPES[entry["dtype"]]))
        try:
            arrays[name] = flat.reshape(entry["shape"])
        # One without elements may have sizes beyond NumPy's.
        except (ValueError, OverflowError) as error:
            raise ValueError(
                f"{name} in {os.fspath(path)!r} has an impossible shape ({error}); fetch "
                "the file again."
            ) from None
    return arrays


def _map_equinox(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """Arrays without names, in the order of the leaves of the model that was written."""
    leaves = [
        (leaf_path(at), leaf)
        for at, leaf in jax.tree_util.tree_leaves_with_path(like)
        if is_array(leaf) or eqx.is_array_like(leaf)
    ]
    try:
        arrays = list(_npy_arrays(path))
    # NumPy evaluates headers, which may nest too deep.
    except (ValueError, EOFError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read ({error}); it is damaged, or not a file "
            "of equinox.tree_serialise_leaves."
        ) from error
    if len(arrays) != len(leaves):
        raise ValueError(
            f"{os.fspath(path)!r} has {len(arrays)} arrays without names, and this model "
            f"{len(leaves)} leaves; load it into the model that was written, and take what "
            "you need from that one."
        )
    # Python's numbers are in the file, too.
    return {name: array for (name, leaf), array in zip(leaves, arrays) if is_array(leaf)}


def _npy_start(content: bytes) -> int:
    """Where arrays begin: Equinox's documentation puts a line of JSON before them."""
    return content.find(b"\n") + 1 if content.startswith(b"{") else 0


def _npy_arrays(path: Path) -> Iterator[np.ndarray]:
    from numpy.lib import format as npy

    data = np.asarray(np.memmap(path, np.uint8, "r"))
    start = _npy_start(data[:_LINE_BYTES].tobytes())
    while start < data.size:
        # Headers are short: NumPy itself refuses those of more than 10,000 bytes.
        file = BytesIO(data[start : start + 16_384].tobytes())
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in read:
            raise ValueError(f"an array has the unknown version {version}")
        shape, is_fortran, dtype = read[version](file)
        if dtype == np.dtype("V2"):
            # NumPy has no name for it. `jax.numpy.load` reads it like this, too.
            dtype = jnp.dtype("bfloat16")
        # Or the next array would begin before this one.
        if any(size < 0 for size in shape):
            raise ValueError(f"an array has the shape {[*shape]}")
        if dtype.kind not in "biufc" and dtype != jnp.bfloat16:
            raise ValueError(f"an array has dtype {dtype}")
        start += file.tell()
        stop = start + dtype.itemsize * int(np.prod(shape, dtype=object))
        if stop > data.size:
            raise ValueError(f"it ends {stop - data.size} bytes too early")
        flat = data[start:stop].view(dtype)
        yield flat.reshape(shape, order="F" if is_fortran else "C")
        start = stop
