"""Tokens behind one index space: in memory, or in files.

A prepared folder has `tokens.bin`, all tokens as unsigned integers of the smallest size
that holds the vocabulary; `ends.bin`, where each document ends, in uint64; and
`prepared.json`, the record of how many of each there are, which is written last.
`recipes/prepare_text.py` writes such a folder. nanoGPT's files, `.bin`, are uint16 tokens
and nothing else.
"""

import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64
from numpy.typing import ArrayLike

from ..._errors import UsageError, UsageFileError
from ...sharding._files import open_file, read_json

_RECORD_FILE, _TOKENS_FILE, _ENDS_FILE = "prepared.json", "tokens.bin", "ends.bin"


@runtime_checkable
class Tokens(Protocol):
    """Many tokens in a row, such as those of a text."""

    @property
    def vocab_size(self) -> int:
        """The number of different tokens; each is at least 0 and less than this."""
        ...

    def __len__(self) -> int:
        """The number of tokens."""
        ...

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape.

        **Arguments:**

        - `indices`: each at least 0 and less than the length.
        """
        ...

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order.

        Readers call this for every batch, so keep the array.
        """
        ...


class TokenArray:
    """Tokens in memory.

    **Arguments:**

    - `tokens`: integers, one after another.
    - `vocab_size`: the number of different tokens; by default, one more than the largest.
    - `ends`: where each document ends, in order; by default they are one document.

    **Raises:**

    `ValueError` if the tokens are not a vector of integers, or are not all less than
    `vocab_size`, or `ends` does not increase up to their number.

    !!! Example

        ```python
        tokens = eqxshard.data.text.TokenArray(tokenizer.encode(text), vocab_size=257)
        ```
    """

    def __init__(
        self,
        tokens: ArrayLike,
        *,
        vocab_size: int | None = None,
        ends: ArrayLike | None = None,
    ):
        found = np.asarray(tokens)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise UsageError(
                f"the tokens are {found.dtype} of shape {found.shape}; give one row of "
                "integers."
            )
        low, high = (int(f(found)) if len(found) else 0 for f in (np.min, np.max))
        self.vocab_size = high + 1 if vocab_size is None else vocab_size
        if not 0 <= low <= high < self.vocab_size:
            raise UsageError(
                f"the tokens are from {low} to {high}, and the vocabulary has "
                f"{self.vocab_size}; give tokens from 0 to {self.vocab_size - 1}."
            )
        self._tokens = found
        self._ends = np.asarray([len(found)] if ends is None else ends, np.int64)
        steps = np.diff(self._ends, prepend=0)
        if len(found) and (np.any(steps <= 0) or self._ends[-1:].tolist() != [len(found)]):
            raise UsageError(
                "ends must increase up to the number of tokens; give the index after the "
                "last token of each document."
            )

    def __len__(self) -> int:
        return len(self._tokens)

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape."""
        return self._tokens[indices].astype(np.int32)

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        return self._ends


class TokenFiles:
    """Tokens in files, read where they are needed.

    The files are mapped into memory, so they may be larger than it.

    **Arguments:**

    - `path`: a folder of prepared text, or a `.bin` file of nanoGPT's: one document of
        tokens in uint16, without a header. The folder has
        - `tokens.bin`: the tokens of all documents, one after another, as unsigned integers
            of the smallest size that holds the vocabulary, little-endian;
        - `ends.bin`: the index after the last token of each document, in uint64;
        - `prepared.json`: `{"vocab_size": 257, "tokens": 1000, "documents": 10}`.
    - `start`, `stop`: the range of tokens to read, as in a slice, such as the last 10 %. A
        document that the range cuts is shorter.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if it is not a token file or
    is truncated, there are no tokens, or the preparation did not finish. While reading,
    `ValueError` if a prepared file has tokens beyond its vocabulary.

    !!! Example

        ```python
        tokens = eqxshard.data.text.TokenFiles("prepared")
        tokens.take(np.arange(100))
        ```
    """

    def __init__(
        self, path: str | os.PathLike[str], *, start: int = 0, stop: int | None = None
    ):
        self.path = Path(path)
        if not self.path.exists():
            raise UsageFileError(f"there is no {self.path}; give a file that exists.")
        self._record = _read_record(self.path) if self.path.is_dir() else None
        if self._record is not None:
            dtype = np.min_scalar_type(self._record["vocab_size"] - 1).newbyteorder("<")
            tokens = _map(self.path / _TOKENS_FILE, dtype, self._record["tokens"])
        elif self.path.suffix == ".bin":
            tokens = _map(self.path, np.dtype("<u2"))
        else:
            raise UsageError(
                f"{self.path} is not a token file; give a .bin file of uint16 tokens, or a "
                "folder of prepared text."
            )
        #: The range of the file's tokens that are read.
        self._range = range(len(tokens))[start:stop]
        self._tokens = tokens[start:stop]
        if not self._range:
            raise UsageError(
                f"there are no tokens from {self._range.start} to {self._range.stop} in "
                f"{self.path}; give a longer text."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # The process that gets this maps the file again.
        first, stop = self._range[0], self._range.stop
        return functools.partial(TokenFiles, start=first, stop=stop), (self.path,)

    @property
    def vocab_size(self) -> int:
        """The number of different tokens; a `.bin` file is read for its largest token."""
        return self._vocab_size

    @functools.cached_property
    def _vocab_size(self) -> int:
        if self._record is not None:
            return self._record["vocab_size"]
        return 1 + int(self._tokens.max())

    def __len__(self) -> int:
        return len(self._tokens)

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape."""
        found = self._tokens[indices].astype(np.int32)
        largest = found.max(initial=0)
        if self._record is not None and largest >= self.vocab_size:
            raise UsageError(
                f"{self.path} has the token {largest}, and the vocabulary has "
                f"{self.vocab_size}; it is damaged, so prepare the text again."
            )
        return found

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        return self._ends

    @functools.cached_property
    def _ends(self) -> Int64[np.ndarray, " documents"]:
        if self._record is None:
            return np.array([len(self)], np.int64)
        path, count = self.path / _ENDS_FILE, self._record["documents"]
        length = self._record["tokens"]
        # Compared before they are read: there cannot be more documents than tokens.
        ends = _map(path, np.dtype("<i8"), count, "c") if count <= length else np.empty(0)
        if ends[-1:].tolist() != [length] or not _increase(ends):
            raise UsageError(
                f"{path} is damaged: the ends of documents do not increase up to the "
                f"{length:,} tokens; prepare the text again."
            )
        start, stop = self._range.start, self._range.stop
        first, last = np.searchsorted(ends, [start + 1, stop])
        ends = ends[first : last + 1]
        # The mapping is private: this copies the pages that change, not the file.
        ends[-1] = stop
        if start:
            ends -= start
        return ends


def _increase(ends: np.ndarray) -> bool:
    """True if the ends of documents increase, from 1 or more."""
    # In parts, to need little memory for any number of documents.
    size = 2**20
    parts = (ends[i : i + size + 1] for i in range(0, len(ends), size))
    return bool(np.all(ends[:1] > 0)) and all(np.all(x[1:] > x[:-1]) for x in parts)


def is_prepared(folder: Path) -> bool:
    """True if a folder has prepared text."""
    return (folder / _RECORD_FILE).exists()


def _read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder of prepared text, checked."""
    path = folder / _RECORD_FILE
    if not path.exists():
        raise UsageError(
            f"{folder} has no {_RECORD_FILE}, so it is not prepared text, or its "
            "preparation did not finish; prepare the text, or give another folder."
        )
    with suppress(ValueError):
        record = read_json(path)
        found = record if isinstance(record, dict) else {}
        numbers = [found.get(name) for name in ("vocab_size", "tokens", "documents")]
        if all(isinstance(n, int) and 0 <= n < 2**63 for n in numbers):
            return found
    raise UsageError(
        f"{path} is damaged, or not from eqxshard; delete the folder, and prepare the "
        "text again."
    )


def _map(
    path: Path, dtype: np.dtype, count: int | None = None, mode: Literal["r", "c"] = "r"
) -> np.ndarray:
    """Memory-map the integers of a file; if `count` is given, it must hold that many.

    With mode "c", the array can be changed, and the file stays as it is.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise UsageFileError(
            f"there is no {path}; give a .bin file, or prepare the text again."
        ) from None
    found, rest = divmod(size, dtype.itemsize)
    if rest or count not in (None, found):
        raise UsageError(
            f"{path} is truncated or damaged: it has {size:,} bytes, not "
            f"{'whole' if count is None else f'{count:,}'} integers of {dtype.itemsize} "
            "bytes; prepare the text again."
        )
    # Without the bookkeeping of np.memmap, which indexing would pay for each time.
    return np.memmap(path, dtype, mode).view(np.ndarray) if found else np.empty(0, dtype)


def as_tokens(tokens: Tokens | ArrayLike) -> Tokens:
    """Tokens, made of an array if necessary."""
    return tokens if isinstance(tokens, Tokens) else TokenArray(tokens)
