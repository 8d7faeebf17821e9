"""Files of `torch.save`, read without torch, and without calling what a pickle names.

Such a file is a zip archive: `data.pkl` describes tensors as parts of storages, whose
bytes are the entries `data/0`, `data/1` and so on, uncompressed.
"""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

#: Storages have the names of C's types, and dtypes of newer kinds their own.
_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_DTYPES += ("float8_e8m0fnu", "uint16", "uint32", "uint64")


#: The instructions that `torch.save` writes. Others reserve memory by what they say.
_INSTRUCTIONS = b".N})]\x88\x89(GJKM\x8aXQ\x80RabcehjqrstuU\x85\x86\x87"
_TUPLES = b")t\x85\x86\x87"
#: Longer tuples, or deeper ones, would take for ever as keys of dicts.
_MOST_ITEMS = 100
#: Python's own in Python, whose memo takes no more memory than is in use.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


@dataclass(frozen=True, eq=False)
class _Storage:
    """Some bytes of the file, and their dtype."""

    data: np.ndarray
    dtype: str


class _Refused(Exception):
    """What a pickle asks for and does not get, and what to do."""


def map_torch(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file of `torch.save` by name, memory-mapped.

    Tensors in dicts of dicts have their keys joined by dots. What is not a tensor is left
    out.

    **Raises:**

    `ValueError` if the file is damaged, or its pickle names anything but tensors and
    plain containers.
    """
    try:
        unpickler = _Unpickler(path)
        return _tensors(unpickler.load(), 10 * len(unpickler.content))
    except _Refused as error:
        raise ValueError(f"{os.fspath(path)!r} {error}") from error
    # A damaged pickle, or one made to do harm, can raise anything.
    except Exception as error:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read ({type(error).__name__}: {error}); it is "
            "damaged, or not a file of torch.save."
        ) from error


def _loads_tuple(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def load_checked(unpickler: Any) -> None:
        load(unpickler)
        _check_tuple(unpickler.stack[-1])

    return load_checked


def _check_tuple(made: tuple[Any, ...]) -> tuple[Any, ...]:
    inner = [part for part in made if isinstance(part, tuple)]
    if len(made) > _MOST_ITEMS or any(isinstance(x, tuple) for y in inner for x in y):
        raise _Refused(
            "has longer or deeper tuples than torch.save writes for weights; write them "
            "alone with torch.save(model.state_dict(), path)."
        )
    return made


_LOADS = {code: _PythonUnpickler.dispatch[code] for code in _INSTRUCTIONS}
_LOADS |= {code: _loads_tuple(_LOADS[code]) for code in _TUPLES}


class _Unpickler(_PythonUnpickler):
    """Makes containers and views of the file, and calls nothing else.

    As Python's documentation has it under "Restricting Globals". Time and memory are
    those of the file: nothing in it can make them grow faster.
    """

    dispatch = _LOADS

    def __init__(self, path: Path):
        self._file = np.asarray(np.memmap(path, np.uint8, "r"))
        with zipfile.ZipFile(path) as archive:
            self._entries = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _Refused(
                "is a zip archive, but not one of torch.save; give another file."
            )
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}constants.pkl" in self._entries:
            raise _Refused(
                "is a TorchScript program; write its weights alone with "
                "torch.save(model.state_dict(), path)."
            )
        order = f"{self._root}byteorder"
        if order in self._entries and self._bytes(order).tobytes() != b"little":
            raise _Refused("was written on a big-endian machine; write it on another.")
        self.content = self._bytes(pickles[0]).tobytes()
        super().__init__(io.BytesIO(self.content))

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle may call: nothing that does more than make an array."""
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: OrderedDict()
        if module == "torch._utils" and name in (
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
        ):
            # A new function each time: pickles can set attributes of what they name.
            return lambda *args: _rebuild_tensor(*args)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("torch", "Size"):
            return lambda sizes: _check_tuple(tuple(sizes))
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return "uint8"
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return name
        raise _Refused(
            f"asks for {module}.{name}, which is not called, because files can ask for "
            "anything; write weights alone with torch.save(model.state_dict(), path)."
        )

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise _Refused("has a storage of an unknown kind; write it again.")
        data = self._bytes(f"{self._root}data/{key}")
        if count * jnp.dtype(dtype).itemsize > data.size:
            raise ValueError(f"storage {key} has only {data.size} bytes")
        return _Storage(data, dtype)

    def _bytes(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise _Refused("is compressed; write it with torch.save again.")
        # The entry's own header: 30 bytes, of which the last four are two lengths.
        start = entry.header_offset + 30
        name_length, extra_length = self._file[start - 4 : start].view("<u2").tolist()
        start += name_length + extra_length
        if start + entry.file_size > self._file.size:
            raise ValueError(f"{name} ends after the file")
        return self._file[start : start + entry.file_size]


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> np.ndarray:
    """A view of a storage. `rest`: requires_grad, hooks, a newer dtype, metadata."""
    newer = [x for x in rest[2:3] if isinstance(x, str)]
    dtype = jnp.dtype(newer[0] if newer else storage.dtype)
    if any(x for x in rest[2:] if not isinstance(x, str)):
        raise _Refused(
            "has a tensor with a pending conjugation or negation; write it after "
            "tensor.resolve_conj().resolve_neg()."
        )
    flat = storage.data.view(dtype)
    ints = (offset, *shape, *strides)
    if not all(type(n) is int and n >= 0 for n in ints) or len(shape) != len(strides):
        raise ValueError("a tensor has an impossible shape")
    if 0 in shape:
        return np.empty(shape, dtype)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides))
    if last >= flat.size:
        raise ValueError(f"a tensor of shape {[*shape]} ends after its storage")
    return np.lib.stride_tricks.as_strided(
        flat[offset:], shape, [step * dtype.itemsize for step in strides], writeable=False
    )


def _tensors(tree: Any, most: int) -> dict[str, np.ndarray]:
    """The tensors in dicts of dicts, by their keys, joined to so many characters at most.

    The same dict may be in several places, and these in the same place twice, and so on.
    """
    found: dict[str, np.ndarray] = {}
    nodes = [("", tree)]
    while nodes:
        name, node = nodes.pop()
        most -= len(name)
        if isinstance(node, np.ndarray):
            found[name] = node
        elif isinstance(node, dict):
            most -= len(node) * (1 + len(name))
            if most < 0:
                raise _Refused(
                    "has dicts in so many places that they have no end; write weights "
                    "alone with torch.save(model.state_dict(), path)."
                )
            start = f"{name}." if name else ""
            below = [(f"{start}{key}", part) for key, part in node.items()]
            nodes += below[::-1]
    return found
