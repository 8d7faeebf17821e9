"""Files of weights, whatever wrote them, as arrays by name, read when they are used."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._errors import UsageError, UsageFileError
from ..sharding._files import open_file, read_json
from ..sharding._leaves import is_array, leaf_path
from ..sharding._text import comma_list

#: The dtypes of safetensors, by the names it gives them.
DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}

#: What to look for in a folder, in the order of preference.
_IN_FOLDERS = ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin")


def map_weights(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a file or folder of weights, by name.

    Nothing is read yet of safetensors and of torch's files, which are memory-mapped.

    **Arguments:**

    - `path`: as for [`eqxshard.load_weights`][].
    - `like`: the model, whose paths name the arrays of an Equinox file.

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
            arrays |= _map_file(file, like)
    except FileNotFoundError:
        raise
    # A damaged file, or one made to do harm, can raise anything.
    except Exception as error:
        # The first sentence: PyTorch's others say how to run what is in the file.
        said = str(error).split("\n")[0].partition(". ")[0]
        raise UsageError(
            f"{os.fspath(file)!r} cannot be read ({type(error).__name__}: {said}); fetch "
            "it again, or convert it to safetensors."
        ) from error
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _find_in(folder: Path) -> Path:
    """The one file, or index of several, in a folder."""
    by_kind = [sorted(folder.glob(pattern)) for pattern in _IN_FOLDERS]
    found = next(filter(None, by_kind), [])
    if len(found) != 1:
        raise UsageFileError(
            f"{os.fspath(folder)!r} has {len(found)} files to choose from; give the path "
            f"of one, or a folder with one of {comma_list(_IN_FOLDERS)}."
        )
    return found[0]


def _map_file(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of one file, by the ending of its name."""
    # Whatever the ending: neither a FIFO nor a device.
    open_file(path).close()
    if path.suffix == ".safetensors":
        return dict(_map_safetensors(path))
    if path.suffix == ".eqx":
        return _read_equinox(path, like)
    if path.suffix in (".pt", ".pth", ".bin"):
        return dict(_map_torch(path))
    raise UsageError("its name must end in .safetensors, .eqx, .pt, .pth or .bin")


def _map_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors import safe_open

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


def _map_torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file of `torch.save`, with dots for dicts in dicts."""
    import torch  # pyright: ignore[reportMissingImports]

    seen: set[int] = set()

    def tensors(name: str, node: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(node, torch.Tensor):
            yield name, node
        elif isinstance(node, dict) and id(node) not in seen:
            # A forged file may share dicts, which would be visited exponentially often.
            seen.add(id(node))
            for key, part in node.items():
                yield from tensors(f"{name}.{key}" if name else str(key), part)

    # Its pickle is not trusted: it can make tensors and plain containers, only.
    tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name, tensor in tensors("", tree):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if not hasattr(np, dtype):
            # NumPy's own types do not include bfloat16 and those of 8 bits.
            tensor = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)
        yield name, tensor.detach().numpy().view(jnp.dtype(dtype))


def _read_equinox(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """Arrays without names, in the order of the leaves of the model that was written."""
    leaves = [
        (leaf_path(at), leaf)
        for at, leaf in jax.tree_util.tree_leaves_with_path(like)
        if is_array(leaf) or eqx.is_array_like(leaf)
    ]
    arrays: list[np.ndarray] = []
    with open_file(path) as file:
        # Equinox's documentation puts a line of JSON before the arrays.
        if file.read(1) == b"{":
            file.readline()
        else:
            file.seek(0)
        size = os.fstat(file.fileno()).st_size
        while file.tell() < size:
            array = np.lib.format.read_array(file, allow_pickle=False)
            # NumPy has no name for bfloat16. `jax.numpy.load` reads it like this, too.
            is_bfloat16 = array.dtype == np.dtype("V2")
            arrays.append(array.view(jnp.bfloat16) if is_bfloat16 else array)
    if len(arrays) != len(leaves):
        raise UsageError(
            f"{len(arrays)} arrays without names, and this model has {len(leaves)} leaves; "
            "load it into the model that was written"
        )
    # Python's numbers are in the file, too.
    return {name: array for (name, leaf), array in zip(leaves, arrays) if is_array(leaf)}
