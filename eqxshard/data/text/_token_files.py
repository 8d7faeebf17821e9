"""Token files: a header, tokens, and where documents end, mapped into memory.

A file has, in little-endian order:

- the header, 64 bytes: the magic `EQXTOKEN`, then 7 integers of 8 bytes: the version, the
  bytes of a token (1, 2 or 4, unsigned), the vocabulary, the number of tokens, the number
  of document ends, how many pieces of the input are in the files up to this one, and 0;
- the tokens, filled up with zero bytes to a multiple of 8;
- the document ends: for each, the number of tokens of this file up to it, in 8 bytes. The
  last document may go on in the next file.

nanoGPT's files, `.bin`, are uint16 tokens and nothing else.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64

from ...sharding._files import open_file, read_json

#: The suffix of token files.
SUFFIX = ".tokens"
#: In a folder of them: how it was, or is being, prepared.
RECORD_FILE = "prepared.json"
_MAGIC = b"EQXTOKEN"
_VERSION = 1
_HEADER_BYTES = 64
_NANOGPT_SUFFIX = ".bin"
#: How many tokens to look at at once for the largest.
_CHUNK = 2**24


class Header(NamedTuple):
    """What a token file says of itself."""

    item_bytes: int
    vocab: int
    size: int
    documents: int
    #: How many pieces of the input are in this file and those before it.
    pieces: int

    @property
    def dtype(self) -> np.dtype:
        """The type of its tokens."""
        return np.dtype(f"<u{self.item_bytes}")

    @property
    def ends_at(self) -> int:
        """The byte where the document ends are."""
        return _HEADER_BYTES + -(-self.size * self.item_bytes // 8) * 8

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.ends_at + 8 * self.documents


class TokenFiles:
    """Tokens in files, one after another, read where they are needed.

    The files are mapped into memory, so they may be larger than it. Each is checked
    against its header first.

    **Arguments:**

    - `paths`: a file, a folder that [`eqxshard.data.text.prepare`][] wrote, or several
        files in order. Files of the suffix `.bin` are nanoGPT's: tokens in uint16, without
        a header.
    - `end`: the token that ends a document in files without a header, such as 50256 in
        nanoGPT's. By default each of them is one document.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if one is not a token file or
    is truncated, there are no tokens, or the preparation did not finish.

    !!! Example

        ```python
        tokens = eqxshard.data.text.TokenFiles("prepared")
        tokens.take(np.arange(100))
        ```
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        end: int | None = None,
    ):
        one = isinstance(paths, str | os.PathLike)
        self.paths = _files(Path(paths)) if one else [Path(path) for path in paths]
        self._end = end
        self._headers = [read_header(path) for path in self.paths]
        self._firsts = np.cumsum([0, *(header.size for header in self._headers)])
        if not len(self):
            raise ValueError(
                f"there are no tokens in {', '.join(map(str, self.paths)) or paths}; give "
                "files that have some."
            )
        self._arrays = self._map()

    def __getstate__(self) -> dict[str, Any]:
        # Mapped again by the process that gets this.
        return {k: v for k, v in self.__dict__.items() if k != "_arrays"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arrays = self._map()

    def _map(self) -> list[np.ndarray]:
        return [_map_tokens(p, h) for p, h in zip(self.paths, self._headers)]

    @property
    def vocab(self) -> int:
        """The number of different tokens.

        Files without a header are read for their largest token, once.
        """
        return self._vocab

    @cached_property
    def _vocab(self) -> int:
        found = zip(self._headers, self._arrays)
        return max(header.vocab or _largest(array) + 1 for header, array in found)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape."""
        if len(self._arrays) == 1:
            return self._take(0, indices)
        found = np.empty(indices.shape, np.int32)
        files = np.searchsorted(self._firsts, indices, side="right") - 1
        for file in np.unique(files).tolist():
            here = files == file
            found[here] = self._take(file, indices[here] - self._firsts[file])
        return found

    def _take(self, file: int, indices: np.ndarray) -> np.ndarray:
        found, vocab = self._arrays[file][indices], self._headers[file].vocab
        if vocab and found.size and found.max() >= vocab:
            raise ValueError(
                f"{self.paths[file]} has the token {found.max()}, and its header tells of "
                f"a vocabulary of {vocab}; it is damaged, so prepare the text again."
            )
        return found.astype(np.int32)

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        return self._ends

    @cached_property
    def _ends(self) -> Int64[np.ndarray, " documents"]:
        parts = [
            first + self._ends_in(i) for i, first in enumerate(self._firsts[:-1].tolist())
        ]
        ends = np.concatenate(parts)
        whole = len(self)
        return ends if len(ends) and ends[-1] == whole else np.append(ends, whole)

    def _ends_in(self, file: int) -> Int64[np.ndarray, " documents"]:
        header, array = self._headers[file], self._arrays[file]
        if header.vocab:
            return _map_ends(self.paths[file], header)
        if self._end is None:
            return np.array([header.size], np.int64)
        chunks = (
            start + 1 + np.flatnonzero(array[start : start + _CHUNK] == self._end)
            for start in range(0, header.size, _CHUNK)
        )
        return np.concatenate(list(chunks))


def is_prepared(folder: Path) -> bool:
    """Whether a folder has token files, or is to have them."""
    names = (f"*{SUFFIX}", RECORD_FILE)
    return folder.is_dir() and any(any(folder.glob(name)) for name in names)


def read_record(folder: Path) -> dict[str, Any]:
    """How a folder of token files was, or is being, prepared."""
    path = folder / RECORD_FILE
    with suppress(ValueError):
        record = read_json(path)
        if isinstance(record, dict) and "shards" in record:
            return record
    raise ValueError(
        f"{path} is damaged, or not from eqxshard; delete the folder, and prepare the "
        "text again."
    )


def read_header(path: Path) -> Header:
    """The header of a token file, checked against its size."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no token file {path}; give one, or a folder of them."
        ) from None
    if not head.startswith(_MAGIC):
        if path.suffix == _NANOGPT_SUFFIX:
            return _headerless(path, size)
        raise ValueError(
            f"{path} is not a token file; give one that python -m eqxshard.data.text "
            "wrote, or a .bin of uint16 tokens."
        )
    fields = np.frombuffer(head[8:].ljust(56, b"\0"), "<u8").tolist()
    version, *rest, _ = fields
    header = Header(*rest)
    if len(head) < _HEADER_BYTES:
        raise _truncated(path, size, "at least 64")
    if version != _VERSION:
        raise ValueError(
            f"{path} is a token file of version {version}, and only version {_VERSION} can "
            "be read; prepare the text again."
        )
    if size != header.nbytes:
        raise _truncated(path, size, f"{header.nbytes:,}")
    is_sound = header.item_bytes in (1, 2, 4) and header.documents <= header.size + 1
    if not is_sound or not 0 < header.vocab <= 256**header.item_bytes:
        raise ValueError(
            f"{path} is damaged: its header tells of {header.documents:,} documents in "
            f"{header.size:,} tokens of {header.item_bytes} bytes, and of a vocabulary of "
            f"{header.vocab:,}; prepare the text again."
        )
    return header


def _truncated(path: Path, size: int, expected: str) -> ValueError:
    return ValueError(
        f"{path} is truncated or damaged: it has {size:,} bytes, and its header tells of "
        f"{expected}; copy it again, or delete it and prepare the text again."
    )


def _headerless(path: Path, size: int) -> Header:
    if size % 2:
        raise ValueError(
            f"{path} is truncated: it has {size:,} bytes, and uint16 tokens take 2 each; "
            "copy it again."
        )
    # A vocabulary of 0 stands for an unknown one.
    return Header(2, 0, size // 2, 0, 0)


def write_tokens(
    path: Path,
    tokens: np.ndarray,
    ends: Int64[np.ndarray, " documents"],
    *,
    vocab: int,
    pieces: int,
) -> None:
    """Write a token file, which appears once it is complete."""
    header = Header(tokens.dtype.itemsize, vocab, len(tokens), len(ends), pieces)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(_MAGIC + np.array([_VERSION, *header, 0], "<u8").tobytes())
        file.write(np.ascontiguousarray(tokens, header.dtype).data)
        file.write(bytes(header.ends_at - file.tell()))
        file.write(ends.astype("<u8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{SUFFIX}"))
    if (path / RECORD_FILE).is_file() and read_record(path)["shards"] != len(files):
        raise ValueError(
            f"the preparation of {path} did not finish, or files are missing; run it "
            "again, which goes on where it stopped."
        )
    return files


def _map_tokens(path: Path, header: Header) -> np.ndarray:
    if not header.size:
        return np.empty(0, header.dtype)
    offset = _HEADER_BYTES if header.vocab else 0
    mapped = np.memmap(path, header.dtype, "r", offset, (header.size,))
    # Without the bookkeeping of np.memmap, which indexing would pay for each time.
    return mapped.view(np.ndarray)


def _map_ends(path: Path, header: Header) -> Int64[np.ndarray, " documents"]:
    with path.open("rb") as file:
        file.seek(header.ends_at)
        ends = np.frombuffer(file.read(8 * header.documents), "<u8").astype(np.int64)
    inside = not len(ends) or (ends[0] >= 0 and ends[-1] <= header.size)
    if not inside or np.any(np.diff(ends) <= 0):
        raise ValueError(
            f"{path} is damaged: the ends of its documents do not increase from 0 to its "
            f"{header.size:,} tokens; prepare the text again."
        )
    return ends


def _largest(array: np.ndarray) -> int:
    starts = range(0, len(array), _CHUNK)
    return max((int(array[start : start + _CHUNK].max()) for start in starts), default=0)
