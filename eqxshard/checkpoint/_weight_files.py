"""Files of safetensors, as arrays by name, read when they are used."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._errors import UsageError, UsageFileError
from ..sharding._files import open_file, read_json

#: The dtypes of safetensors, by the names it gives them.
DTYPES = {
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


def map_weights(path: Path) -> dict[str, np.ndarray]:
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

    # Neither a FIFO nor a device.
    open_file(path).close()
    if path.suffix != ".safetensors":
        raise UsageError("its name must end in .safetensors")
    # Validates the header.
    with safe_open(path, "np"):
        pass
    # It cannot read 8-bit floats into NumPy. A memory map can, and reads only parts.
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    # Mapped from the start, because the data may be empty, which cannot be mapped.
    data = np.asarray(np.memmap(path, np.uint8, "r"))[8 + length :]
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = jnp.dtype(DTYPES[entry["dtype"]])
        yield name, data[start:stop].view(dtype).reshape(entry["shape"])
