"""Token files, mapped into memory.

A prepared folder has `prepared.json`, the record of how it was made; and for each shard
`00000.npy`, its tokens as unsigned integers, and `00000.ends.npy`: for each document that
ends in the shard, the number of the shard's tokens up to there. The last document of a
shard may go on in the next.

nanoGPT's files, `.bin`, are uint16 tokens and nothing else.
"""

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Int64

from ...sharding._files import open_file, read_json

#: In a folder of token files: how it was prepared. It is written last.
RECORD_FILE = "prepared.json"
#: How many tokens to look at at once.
_CHUNK = 2**24


class TokenFiles:
    """Tokens in files, one after another, read where they are needed.

    The files are mapped into memory, so they may be larger than it.

    **Arguments:**

    - `paths`: a folder that [`eqxshard.data.text.prepare`][] wrote, or one or several of
        nanoGPT's files, `.bin`: tokens in uint16, without a header.
    - `eos_id`: the token that ends a document in `.bin` files, such as 50256 in nanoGPT's.
        By default each of them is one document.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if one is not a token file or
    is truncated, there are no tokens, or the preparation did not finish. While reading,
    `ValueError` if a file has tokens beyond its vocabulary.

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
        eos_id: int | None = None,
    ):
        several = [paths] if isinstance(paths, str | os.PathLike) else paths
        self.paths = [Path(path) for path in several]
        self._eos_id = eos_id
        self._vocab_size: int | None = None
        self._is_prepared = len(self.paths) == 1 and self.paths[0].is_dir()
        if self._is_prepared:
            record = read_record(self.paths[0])
            self._vocab_size = record["vocab_size"]
            self._files = [
                shard_file(self.paths[0], n) for n in range(len(record["shards"]))
            ]
            self._arrays = [_map(*of) for of in zip(self._files, record["shards"])]
        else:
            self._files = self.paths
            self._arrays = [_map_bin(path) for path in self.paths]
        self._firsts = np.cumsum([0, *map(len, self._arrays)])
        if not len(self):
            names = ", ".join(map(str, self.paths))
            raise ValueError(f"there are no tokens in {names}; give files that have some.")

    def __reduce__(self) -> tuple[Any, ...]:
        # Mapped again by the process that gets this.
        return functools.partial(TokenFiles, eos_id=self._eos_id), (self.paths,)

    @property
    def vocab_size(self) -> int:
        """The number of different tokens.

        Files without a record are read for their largest token, once.
        """
        if self._vocab_size is None:
            parts = (part for array in self._arrays for part in _chunks(array))
            self._vocab_size = 1 + max(int(part.max()) for part in parts)
        return self._vocab_size

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def take(self, indices: Int[np.ndarray, "..."]) -> Int32[np.ndarray, "..."]:
        """The tokens at some indices, in an array of the same shape."""
        found = np.empty(indices.shape, np.int32)
        files = np.searchsorted(self._firsts, indices, side="right") - 1
        for file in np.unique(files).tolist():
            here = files == file
            tokens = self._arrays[file][indices[here] - self._firsts[file]]
            if self._is_prepared and tokens.max() >= self.vocab_size:
                raise ValueError(
                    f"{self._files[file]} has the token {tokens.max()}, and the vocabulary "
                    f"has {self.vocab_size}; it is damaged, so prepare the text again."
                )
            found[here] = tokens
        return found

    def ends(self) -> Int64[np.ndarray, " documents"]:
        """Where each document ends: the index after its last token, in order."""
        return self._ends

    @functools.cached_property
    def _ends(self) -> Int64[np.ndarray, " documents"]:
        firsts = self._firsts[:-1].tolist()
        ends = np.concatenate([first + self._ends_in(i) for i, first in enumerate(firsts)])
        whole = len(self)
        return ends if len(ends) and ends[-1] == whole else np.append(ends, whole)

    def _ends_in(self, file: int) -> Int64[np.ndarray, " documents"]:
        path, array = self._files[file], self._arrays[file]
        if self._is_prepared:
            return _read_ends(path, len(array))
        if self._eos_id is None:
            return np.array([len(array)], np.int64)
        found = [1 + np.flatnonzero(part == self._eos_id) for part in _chunks(array)]
        return np.concatenate([n * _CHUNK + part for n, part in enumerate(found)])


def shard_file(folder: Path, number: int) -> Path:
    """The file of a shard's tokens."""
    return folder / f"{number:05}.npy"


def ends_file(tokens: Path) -> Path:
    """The file of the ends of documents in a shard."""
    return tokens.with_suffix(".ends.npy")


def is_prepared(folder: Path) -> bool:
    """Whether a folder has prepared text."""
    return (folder / RECORD_FILE).exists()


def read_record(folder: Path) -> dict[str, Any]:
    """How a folder of token files was prepared."""
    path = folder / RECORD_FILE
    if not path.exists():
        raise ValueError(
            f"{folder} has no {RECORD_FILE}, so it is not prepared text, or its "
            "preparation did not finish; prepare the text, or give another folder."
        )
    with suppress(ValueError, TypeError):
        record = read_json(path)
        found = record if isinstance(record, dict) else {}
        numbers = [found.get("vocab_size"), *found.get("shards", [None])]
        if all(isinstance(number, int) for number in numbers):
            return found
    raise ValueError(
        f"{path} is damaged, or not from eqxshard; delete the folder, and prepare the "
        "text again."
    )


def _map(path: Path, length: int | None = None) -> np.ndarray:
    """A vector of unsigned integers in a file, of a length if that is known."""
    try:
        open_file(path).close()
        # Without the bookkeeping of np.memmap, which indexing would pay for each time.
        array = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no {path}, which is a part of the prepared text; prepare it again."
        ) from None
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} is truncated or damaged ({error}); prepare the text again."
        ) from None
    if array.ndim != 1 or array.dtype.kind != "u" or length not in (None, len(array)):
        raise ValueError(
            f"{path} is damaged: it has {array.dtype} of shape {array.shape}, where there "
            f"were {length or 'some'} unsigned integers; prepare the text again."
        )
    return array


def _map_bin(path: Path) -> np.ndarray:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no token file {path}; give a .bin file, or a prepared folder."
        ) from None
    if path.suffix != ".bin" or size % 2:
        raise ValueError(
            f"{path} has {size:,} bytes and is not, or not all of, a .bin file of uint16 "
            "tokens; give one, or a folder of prepared text."
        )
    if not size:
        return np.empty(0, np.uint16)
    return np.memmap(path, "<u2", "r").view(np.ndarray)


def _read_ends(tokens: Path, length: int) -> Int64[np.ndarray, " documents"]:
    path = ends_file(tokens)
    ends = _map(path)
    # They are compared before they are read: there is at most one for each token, and 0.
    if len(ends) <= length + 1:
        found = ends.astype(np.int64)
        inside = not len(ends) or (found[0] >= 0 and found[-1] <= length)
        if inside and not np.any(np.diff(found) <= 0):
            return found
    raise ValueError(
        f"{path} is damaged: the ends of documents do not increase from 0 to the "
        f"{length:,} tokens of {tokens.name}; prepare the text again."
    )


def _chunks(array: np.ndarray) -> list[np.ndarray]:
    return [array[start : start + _CHUNK] for start in range(0, len(array), _CHUNK)]
