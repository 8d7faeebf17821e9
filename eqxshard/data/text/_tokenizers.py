"""Tokenizers: from text to integers and back."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from ..._errors import UsageError, UsageFileError
from ...sharding._files import read_json

#: The name of a tokenizer's file in a folder.
TOKENIZER_FILE = "tokenizer.json"
#: The entry that tells our files from those of Hugging Face.
_KIND = "eqxshard_tokenizer"
#: What published tokenizers call the token between documents.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
#: Stands for a token that has no text, as it does for bytes that are not UTF-8.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into tokens, and tokens into text."""

    @property
    def vocab_size(self) -> int:
        """The number of different tokens; each is at least 0 and less than this."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The token that follows each document, if there is one."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens."""
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that [`eqxshard.data.text.load_tokenizer`][] reads."""
        ...


class ByteTokenizer:
    """The bytes of a text in UTF-8: 256 tokens, and one that ends a document.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.ByteTokenizer()
        tokenizer.encode("né")  # [110, 195, 169]
        ```
    """

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens, without those that end documents."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that [`eqxshard.data.text.load_tokenizer`][] reads."""
        _write(path, {_KIND: "byte"})


class CharTokenizer:
    """One token for each of some characters, in the order of their code points.

    **Arguments:**

    - `chars`: the characters, or texts of them, in any order; repeated ones count once.

    **Raises:**

    `ValueError` if there are none, and, in `encode`, if a text has others.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.CharTokenizer("abracadabra")
        tokenizer.encode("cab")  # [2, 0, 1]
        ```
    """

    eos_id = None

    def __init__(self, chars: Iterable[str]):
        found: set[str] = set()
        for some in chars:
            found.update(some)
        self.chars = "".join(sorted(found))
        if not self.chars:
            raise UsageError("a char tokenizer needs characters; give text= that has some.")
        self.vocab_size = len(self.chars)
        self._ids = {char: number for number, char in enumerate(self.chars)}

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32."""
        try:
            return np.array([self._ids[char] for char in text], np.int32)
        except KeyError as error:
            raise UsageError(
                f"the text has {error.args[0]!r}, which is not among the tokenizer's "
                "characters; make the tokenizer of a text that has it, or leave it out."
            ) from None

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens."""
        ids = np.asarray(ids)
        return "".join(
            self.chars[i] if i < self.vocab_size else _UNKNOWN for i in ids.tolist()
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that [`eqxshard.data.text.load_tokenizer`][] reads."""
        _write(path, {_KIND: "char", "chars": self.chars})


class HFTokenizer:
    """A tokenizer of Hugging Face, from its file `tokenizer.json`.

    Needs `pip install eqxshard[text]`. Only the text is encoded: nothing is added before
    or after it, and what looks like a special token is text.

    **Arguments:**

    - `path`: the file, or a folder that has one of the name `tokenizer.json`.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if it is not a tokenizer;
    `ImportError` without the package `tokenizers`.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.HFTokenizer("gpt2/tokenizer.json")
        ```
    """

    def __init__(self, path: str | os.PathLike[str]):
        path = _file(path)
        content = json.dumps(_read(path))
        try:
            import tokenizers
        except ImportError:
            raise ImportError(
                f"{path} is a tokenizer of Hugging Face, which needs the package "
                "tokenizers; pip install 'eqxshard[text]'."
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:
            # The package raises no narrower class.
            raise UsageError(
                f"{path} is not a tokenizer of Hugging Face ({error}); give the file "
                "tokenizer.json of a model."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        # There may be gaps, so this may be more than there are.
        self.vocab_size = 1 + max(ids.values(), default=0)
        self.eos_id = next((ids[end] for end in _ENDS if end in ids), None)

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[Int[np.ndarray, " n"]]:
        """The tokens of several texts, encoded by all cores."""
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that [`eqxshard.data.text.load_tokenizer`][] reads."""
        self._tokenizer.save(os.fspath(path))


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> Sequence[Int[np.ndarray, " n"]]:
    """The tokens of several texts."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_batch(texts)
    return [tokenizer.encode(text) for text in texts]


def load_tokenizer(
    tokenizer: str | os.PathLike[str], *, text: str | None = None
) -> Tokenizer:
    """A tokenizer, by its name or from its file.

    **Arguments:**

    - `tokenizer`: `"byte"`, `"char"`, or the path of a file: the `tokenizer.json` of a
        Hugging Face model, or one that a tokenizer's `save` wrote. A folder may stand for
        its `tokenizer.json`.
    - `text`: the text whose characters `"char"` takes.

    **Raises:**

    `FileNotFoundError` if there is no such file; `ValueError` if it is not a tokenizer, or
    `"char"` has no text; `ImportError` if it needs the package `tokenizers` and that is not
    installed.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.load_tokenizer("byte")
        ```
    """
    if tokenizer == "byte":
        return ByteTokenizer()
    if tokenizer == "char":
        return CharTokenizer(text or "")
    saved = _read(_file(tokenizer))
    kind = saved.get(_KIND) if isinstance(saved, dict) else None
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        chars = saved.get("chars")
        return CharTokenizer(chars if isinstance(chars, str) else "")
    return HFTokenizer(tokenizer)


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / TOKENIZER_FILE if path.is_dir() else path


def _read(path: Path) -> Any:
    """The JSON of a tokenizer's file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise UsageFileError(
            f"there is no tokenizer {path}; give 'byte', 'char' or the tokenizer.json of "
            "a model."
        ) from None


def _write(path: str | os.PathLike[str], saved: dict[str, str]) -> None:
    Path(path).write_text(json.dumps(saved), encoding="utf-8")
