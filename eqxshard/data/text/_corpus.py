"""A text to train on and one to evaluate on, from text files or token files."""

import codecs
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..._errors import UsageError, UsageFileError
from ...sharding._files import open_file
from .._datasets import dataset_folder, read_file
from ._bytes import ByteTokenizer
from ._tokens import TokenArray, TokenFiles, Tokens, is_prepared

_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


@dataclass(frozen=True)
class Corpus:
    """Text to train on and to evaluate on, as tokens.

    [`eqxshard.data.text.open_corpus`][] and [`eqxshard.data.text.shakespeare`][] return
    these.

    - `train`, `valid`: the [`eqxshard.data.text.Tokens`][] of each.
    - `name`: the name of the text, for logs and summaries.
    """

    train: Tokens
    valid: Tokens
    name: str = ""

    @property
    def vocab_size(self) -> int:
        """The number of different tokens, the smallest vocabulary for a model."""
        return max(self.train.vocab_size, self.valid.vocab_size)


def open_corpus(path: str | os.PathLike[str], *, valid: float = 0.1) -> Corpus:
    """A text to train on and one to evaluate on.

    **Arguments:**

    - `path`: one of
        - a file of text, `.txt`, whose tokens are its bytes, those of an
            [`eqxshard.data.text.ByteTokenizer`][] (a byte-order mark is left out);
        - a folder of prepared text, as `recipes/prepare_text.py` writes it;
        - a folder with two such folders, `train` and `valid`;
        - a folder with `train.bin` and `val.bin`, as nanoGPT prepares them.
    - `valid`: the part of the tokens to evaluate on, from the end, if `path` has no such
        part. Of `n` tokens, the first `int(n * (1 - valid))` are to train on. A document
        that this cuts is shorter in both parts.

    **Returns:**

    An [`eqxshard.data.text.Corpus`][].

    **Raises:**

    `FileNotFoundError` if there is nothing at the path; `ValueError` if it is none of
    these, holds no tokens or damaged ones, or `valid` is not between 0 and 1, or leaves
    no token for one of the parts.

    !!! Example

        ```python
        corpus = eqxshard.data.text.open_corpus("prepared")
        ```
    """
    path = Path(path)
    if not 0 < valid < 1:
        raise UsageError(f"valid={valid} must be between 0 and 1.")
    if not path.exists():
        raise UsageFileError(
            f"there is no {path}; give a .txt file or a folder of token files."
        )
    if path.is_file() and path.suffix == ".txt":
        with open_file(path) as file:
            text = file.read().removeprefix(codecs.BOM_UTF8)
        return _split_text(text, valid, path.stem)
    if is_prepared(path):
        cut = _cut(len(TokenFiles(path)), valid, str(path))
        train, held_out = TokenFiles(path, stop=cut), TokenFiles(path, start=cut)
    else:
        train, held_out = map(TokenFiles, _find_parts(path))
    return Corpus(train, held_out, path.resolve().name)


def shakespeare(data_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """Plays of Shakespeare: 1,115,394 bytes, 65 different ones.

    The first 90 % are to train on and the last 10 % to evaluate on, as in
    [nanoGPT](https://github.com/karpathy/nanoGPT).

    The file `shakespeare/input.txt` is read from `data_dir` if given, else from
    `$EQXSHARD_DATA_DIR` if set, else from the user's cache directory, and downloaded if it
    is missing there.

    **Arguments:**

    - `data_dir`: the directory to read from.

    **Returns:**

    An [`eqxshard.data.text.Corpus`][].

    **Raises:**

    `FileNotFoundError` if the file is missing and cannot be downloaded; `ValueError` if it
    is damaged.

    !!! Example

        ```python
        corpus = eqxshard.data.text.shakespeare()
        ```
    """
    path = dataset_folder(data_dir) / "shakespeare" / "input.txt"
    return _split_text(read_file(path, _URL, _SHA256), 0.1, "shakespeare")


def _split_text(text: bytes, valid: float, name: str) -> Corpus:
    """The corpus of a text in memory, whose last part is to evaluate on."""
    if not text:
        raise UsageError(f"the text {name} is empty; give one with at least a character.")
    tokens = np.frombuffer(text, np.uint8)
    cut = _cut(len(tokens), valid, name)
    train, held_out = (
        TokenArray(part, vocab_size=ByteTokenizer.vocab_size)
        for part in (tokens[:cut], tokens[cut:])
    )
    return Corpus(train, held_out, name)


def _cut(count: int, valid: float, name: str) -> int:
    """The number of tokens to train on."""
    cut = int(count * (1 - valid))
    if not 0 < cut < count:
        raise UsageError(
            f"{name} has {count:,} tokens, of which valid={valid} would leave {cut:,} to "
            f"train on and {count - cut:,} to evaluate on; give another valid, or a longer "
            "text."
        )
    return cut


def _find_parts(folder: Path) -> tuple[Path, Path]:
    """The folders or files of a corpus that is already split in two."""
    for names in (("train", "valid"), ("train.bin", "val.bin")):
        train, valid = (folder / name for name in names)
        if train.exists() and valid.exists():
            return train, valid
    raise UsageError(
        f"{folder} is not a corpus; give a .txt file, a folder that "
        "recipes/prepare_text.py wrote, or one with train.bin and val.bin."
    )
