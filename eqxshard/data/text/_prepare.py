"""Preparation: from files of text to token files."""

import contextlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from ..._errors import UsageError, UsageFileError
from ...sharding._files import local_path, open_file, parse_json
from ...sharding._text import first_few
from ._tokenizers import (
    TOKENIZER_FILE,
    CharTokenizer,
    Tokenizer,
    encode_all,
    load_tokenizer,
)
from ._tokens import (
    ENDS_FILE,
    RECORD_FILE,
    TOKENS_FILE,
    TokenFiles,
    is_prepared,
    token_dtype,
)

_SUFFIXES = (".txt", ".jsonl")
#: A larger text is encoded in parts of about this many characters.
_PART_CHARS = 2**17
#: How many parts or documents are encoded at once. Tokenizers of Hugging Face take more
#: than a hundred bytes for a token while they do.
_TOGETHER = 64


class _Part(NamedTuple):
    """A document's text, or a part of it."""

    text: str
    #: Whether the document ends with it.
    ends: bool


def prepare(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | Tokenizer,
) -> TokenFiles:
    """Encode files of text into token files.

    A text file is one document, as is each line of a `.jsonl` file, its entry `"text"`;
    empty ones are left out. If the tokenizer has a token that ends documents, each gets it.
    The folder also gets the tokenizer, as `tokenizer.json`. Tokenizers of Hugging Face use
    all cores.

    A folder that is prepared already is left as it is, and refused; one whose preparation
    was interrupted is prepared again.

    **Arguments:**

    - `inputs`: files of text, `.txt` or `.jsonl`, in UTF-8, and folders of them, whose
        files are taken in the order of their names.
    - `output`: the folder to write.
    - `tokenizer`: a tokenizer, or what [`eqxshard.data.text.load_tokenizer`][] takes;
        `"char"` takes the characters of all the inputs.

    **Returns:**

    The [`eqxshard.data.text.TokenFiles`][].

    **Raises:**

    `FileNotFoundError` if there is no such input; `ValueError` if one is not text, there
    are no tokens, or the folder is prepared already.

    !!! Example

        ```python
        eqxshard.data.text.prepare("articles.jsonl", "prepared", "gpt2/tokenizer.json")
        ```
    """
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files, folder = _find(given), local_path(output, "output=")
    if is_prepared(folder):
        raise UsageError(
            f"{folder} is prepared already; open it, delete it, or give another output."
        )
    if tokenizer == "char":
        tokenizer = CharTokenizer(part.text for part in read_parts(files))
    elif not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / TOKENIZER_FILE)
    tokens, documents = _encode(read_parts(files), tokenizer, folder)
    if not tokens:
        for name in (TOKENIZER_FILE, TOKENS_FILE, ENDS_FILE):
            (folder / name).unlink()
        # It stays if it has files of the user's.
        with contextlib.suppress(OSError):
            folder.rmdir()
        where = first_few([*map(str, files)])
        raise UsageError(f"there are no tokens in {where}; give more text.")
    sizes = {"tokens": tokens, "documents": documents}
    # Last, and in one piece: a folder without it is not prepared.
    part = folder / f"{RECORD_FILE}.part"
    part.write_text(
        json.dumps({"vocab_size": tokenizer.vocab_size, **sizes}), encoding="utf-8"
    )
    part.replace(folder / RECORD_FILE)
    return TokenFiles(folder)


def _encode(parts: Iterator[_Part], tokenizer: Tokenizer, folder: Path) -> tuple[int, int]:
    """Write the files of tokens and of ends; return the number of each."""
    dtype = token_dtype(tokenizer.vocab_size)
    # A vector of 64-bit integers, as there may be many documents.
    count, ends = 0, array("Q", [0])
    with (folder / TOKENS_FILE).open("wb") as file:
        while group := list(itertools.islice(parts, _TOGETHER)):
            encoded = encode_all(tokenizer, [part.text for part in group])
            for part, tokens in zip(group, encoded):
                if part.ends and tokenizer.eos_id is not None:
                    tokens = np.append(tokens, np.int32(tokenizer.eos_id))
                file.write(tokens.astype(dtype).tobytes())
                count += len(tokens)
                # A document without tokens is none.
                if part.ends and count > ends[-1]:
                    ends.append(count)
    (folder / ENDS_FILE).write_bytes(np.array(ends[1:], "<u8").tobytes())
    return count, len(ends) - 1


def _find(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files of text at some paths, those of each folder in the order of their names."""
    files = []
    for path in map(Path, inputs):
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        found = [file for file in found if file.suffix in _SUFFIXES]
        if not found:
            raise UsageFileError(
                f"there is no text at {path}; give files (.txt, .jsonl) or folders of them."
            )
        files += found
    return files


def read_parts(files: Iterable[Path]) -> Iterator[_Part]:
    """The documents of some files, large ones in parts; always the same."""
    for path in files:
        open_file(path).close()
        with path.open(encoding="utf-8") as file:
            try:
                if path.suffix == ".jsonl":
                    yield from _lines(file, path)
                else:
                    yield from _parts_of_text(file)
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path} is not text in UTF-8 ({error.reason}); convert it first."
                ) from None


def _parts_of_text(file: TextIO) -> Iterator[_Part]:
    """One document, cut where a line of text follows another.

    Elsewhere a tokenizer may join several line ends into one token.
    """
    held: list[str] = []
    size = 0
    for line in file:
        if size >= _PART_CHARS and held[-1].strip() and line.strip():
            yield _Part("".join(held), False)
            held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield _Part("".join(held), True)


def _lines(file: TextIO, path: Path) -> Iterator[_Part]:
    """The documents in lines of JSON."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = parse_json(line)["text"]
            # JSON can escape half of a character: "\\ud83d".
            text.encode()
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UsageError(
                f"{path} has no document in line {number}, or one that is not Unicode; "
                'give lines such as {"text": "..."}.'
            ) from None
        if text:
            yield _Part(text, True)
