"""Files of weights, whatever wrote them, as memory-mapped arrays by name."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..sharding._files import open_file, read_json
from ..sharding._leaves import is_array, leaf_path
from ..sharding._text import comma_list, first_few

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


def map_weights(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of a file or folder of weights, by name.

    Nothing is read yet of safetensors and of torch's files, which are memory-mapped.

    **Arguments:**

    - `path`: as for [`eqxshard.load_weights`][].
    - `like`: the model, whose paths name the arrays of an Equinox file.

    **Raises:**

    `FileNotFoundError` if there is nothing at `path`, `ValueError` if it cannot be read.
    """
    file = _choose(path) if path.is_dir() else path
    if not file.exists():
        file = index_of(path)
    if not file.exists():
        raise FileNotFoundError(
            f"{os.fspath(path)!r} does not exist; give a file of weights, or the folder of "
            "one."
        )
    if file.name.endswith(".index.json"):
        return _map_index(file, like)
    return _map_file(file, like)


def _map_file(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of one file, by what it begins with."""
    with open_file(path) as file:
        start = file.read(_LINE_BYTES)
    if start[_npy_start(start) :].startswith(_NPY):
        return _map_equinox(path, like)
    if start.startswith(_ZIP):
        return _map_torch(path)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return _map_safetensors(path)
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
                f"({first_few(found)}) and no index of them; give one of the files."
            )
    raise FileNotFoundError(
        f"there are no weights in {os.fspath(folder)!r}; give a file, or a folder with one "
        f"that ends in {comma_list(_ENDINGS)}."
    )


def _map_index(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """The arrays of all files that an index names."""
    try:
        file_of = read_json(path)["weight_map"]
        files = sorted({*file_of.values()})
        # They are beside it, and no index.
        if any(Path(name).name != name for name in files):
            raise ValueError("it names files elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{os.fspath(path)!r} is not an index of weights, or is damaged "
            f"({type(error).__name__}: {error}); fetch it again."
        ) from error
    missing = [name for name in files if not os.path.isfile(path.parent / name)]
    if missing:
        raise FileNotFoundError(
            f"{os.fspath(path)!r} names {len(files)} files, and {first_few(missing)} "
            "cannot be found beside it; fetch all of them."
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


def _map_torch(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file of `torch.save`, with dots for dicts in dicts."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{os.fspath(path)!r} is a file of torch.save, which takes torch to read; "
            "install it, or convert the file to safetensors."
        ) from None
    try:
        # Its pickle is not trusted: it can make tensors and plain containers, only.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: _as_array(tensor, torch) for name, tensor in _tensors(found, torch)}
    # A damaged file, or one made to do harm, can raise anything.
    except Exception as error:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read by torch.load with weights_only=True "
            f"({type(error).__name__}); it is damaged, or has more than weights: write "
            "these alone with torch.save(model.state_dict(), path)."
        ) from error


def _tensors(tree: Any, torch: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in dicts of dicts, each dict once, whatever else refers to it."""
    seen: set[int] = set()
    nodes = [("", tree)]
    while nodes:
        name, node = nodes.pop()
        if isinstance(node, torch.Tensor):
            yield name, node
        elif isinstance(node, dict) and id(node) not in seen:
            seen.add(id(node))
            start = f"{name}." if name else ""
            nodes += reversed([(f"{start}{key}", part) for key, part in node.items()])


def _as_array(tensor: Any, torch: Any) -> np.ndarray:
    """A view of a tensor that cannot be written to."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if hasattr(np, name):
        array = tensor.numpy()
    else:
        # NumPy's own types do not include bfloat16 and those of 8 bits.
        bits = torch.int16 if tensor.itemsize == 2 else torch.uint8
        array = tensor.view(bits).numpy().view(jnp.dtype(name))
    array.flags.writeable = False
    return array


def _map_equinox(path: Path, like: PyTree) -> dict[str, np.ndarray]:
    """Arrays without names, in the order of the leaves of the model that was written."""
    leaves = [
        (leaf_path(at), leaf)
        for at, leaf in jax.tree_util.tree_leaves_with_path(like)
        if is_array(leaf) or eqx.is_array_like(leaf)
    ]
    try:
        with open_file(path) as file:
            arrays = list(_npy_arrays(file))
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


def _npy_arrays(file: BinaryIO) -> Iterator[np.ndarray]:
    size = os.fstat(file.fileno()).st_size
    file.seek(_npy_start(file.read(_LINE_BYTES)))
    while file.tell() < size:
        array = np.lib.format.read_array(file, allow_pickle=False)
        array.flags.writeable = False
        # NumPy has no name for bfloat16. `jax.numpy.load` reads it like this, too.
        yield array.view(jnp.bfloat16) if array.dtype == np.dtype("V2") else array
