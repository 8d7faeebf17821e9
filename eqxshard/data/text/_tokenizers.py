"""Tokenizers: from text to integers and back."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from ...sharding._files import parse_json, read_bytes

#: The name of a tokenizer's file in a folder of token files.
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
    def name(self) -> str:
        """For logs and summaries."""
        ...

    @property
    def vocab(self) -> int:
        """The number of different tokens; each is at least 0 and less than this."""
        ...

    @property
    def end(self) -> int | None:
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

    name = "byte"
    vocab = 257
    end = 256

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

    - `chars`: the characters, in any order; repeated ones count once.

    **Raises:**

    `ValueError` if there are none, and, in `encode`, if a text has others.

    !!! Example

        ```python
        tokenizer = eqxshard.data.text.CharTokenizer.of("abracadabra")
        tokenizer.encode("cab")  # [2, 0, 1]
        ```
    """

    name = "char"
    end = None

    def __init__(self, chars: Iterable[str]):
        self.chars = "".join(sorted(set().union(*chars)))
        if not self.chars:
            raise ValueError("there are no characters; give the tokenizer at least one.")
        self.vocab = len(self.chars)
        self._codes = _code_points(self.chars)

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The tokenizer of all characters of a text.

        **Arguments:**

        - `text`: the text.
        """
        return cls(set(text))

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32."""
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes).astype(np.int32)
        wrong = np.flatnonzero(self._codes[np.minimum(ids, self.vocab - 1)] != codes)
        if len(wrong):
            char = text[wrong[0]]
            raise ValueError(
                f"the text has {char!r} (U+{ord(char):04X}) at character {wrong[0]:,}, "
                f"which is not among the tokenizer's {self.vocab} characters; make the "
                "tokenizer of a text that has it, or leave it out."
            )
        return ids

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens."""
        ids = np.asarray(ids)
        return "".join(self.chars[i] if i < self.vocab else _UNKNOWN for i in ids.tolist())

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
        self.name = path.parent.name if path.name == TOKENIZER_FILE else path.stem
        self._json = _read(path)
        try:
            self._load()
        except ImportError:
            raise ImportError(
                f"{path} is a tokenizer of Hugging Face, which needs the package "
                "tokenizers; pip install 'eqxshard[text]'."
            ) from None
        except Exception as error:
            # The package raises no narrower class.
            raise ValueError(
                f"{path} is not a tokenizer of Hugging Face ({error}); give the file "
                "tokenizer.json of a model."
            ) from error
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        # There may be gaps, so this may be more than there are.
        self.vocab = 1 + max(ids.values(), default=0)
        self.end = next((ids[end] for end in _ENDS if end in ids), None)

    def _load(self) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_tokenizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def encode(self, text: str) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """The text of some tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that [`eqxshard.data.text.load_tokenizer`][] reads."""
        Path(path).write_text(self._json, encoding="utf-8")


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
        if text is None:
            raise ValueError(
                "tokenizer='char' takes its characters from a text; give text=, or the "
                "tokenizer.json that was saved beside the tokens."
            )
        return CharTokenizer.of(text)
    path = _file(tokenizer)
    content = _read(path)
    try:
        saved = parse_json(content)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a tokenizer: it is not JSON ({error}); give 'byte', 'char' or "
            "the tokenizer.json of a model."
        ) from None
    kind = saved.get(_KIND) if isinstance(saved, dict) else None
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        chars = saved.get("chars")
        return CharTokenizer(chars if isinstance(chars, str) else "")
    return HFTokenizer(path)


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / TOKENIZER_FILE if path.is_dir() else path


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no tokenizer {path}; give 'byte', 'char' or the tokenizer.json of "
            "a model."
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is not a tokenizer: it is not text; give 'byte', 'char' or the "
            "tokenizer.json of a model."
        ) from None


def _write(path: str | os.PathLike[str], saved: dict[str, str]) -> None:
    Path(path).write_text(json.dumps(saved), encoding="utf-8")


def _code_points(text: str) -> Int[np.ndarray, " n"]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
