"""Tiny Shakespeare (Karpathy, 2015): a megabyte of plays, for a first language model."""

import os
import string

from .._download import dataset_folder, mirrors, read_file
from .._planning import is_planning
from ._corpus import Corpus, encode_corpus
from ._tokenizers import Tokenizer

_LENGTH = 1_115_394
_CHARACTERS = "\n !$&',-.3:;?" + string.ascii_letters
_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_MIRRORS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)


def shakespeare(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    tokenizer: str | os.PathLike[str] | Tokenizer = "char",
) -> Corpus:
    """Plays of Shakespeare: 1,115,394 characters, 65 different ones.

    The first 90 % are to train on and the last 10 % to evaluate on, as in
    [nanoGPT](https://github.com/karpathy/nanoGPT).

    The file `shakespeare/input.txt` is read from `data_dir` if given, else from
    `$EQXSHARD_DATA_DIR` if set, else from the user's cache directory, and downloaded if it
    is missing there, or from `$EQXSHARD_SHAKESPEARE_URL`, the URL of another copy.

    **Arguments:**

    - `data_dir`: the directory to read from.
    - `tokenizer`: as for [`eqxshard.data.text.open_corpus`][].

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
    if is_planning():
        text = _CHARACTERS * (_LENGTH // len(_CHARACTERS) + 1)
        return encode_corpus(text[:_LENGTH], tokenizer, name="shakespeare")
    path = dataset_folder(data_dir) / "shakespeare" / "input.txt"
    urls = mirrors("EQXSHARD_SHAKESPEARE_URL", _MIRRORS)
    text = read_file(path, urls, _SHA256).decode()
    return encode_corpus(text, tokenizer, name="shakespeare")
