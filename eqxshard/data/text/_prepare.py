"""Preparation: from files of text to token files."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from ...sharding._files import open_file, parse_json
from ...sharding._paths import local_path
from ._token_files import RECORD_FILE, TokenFiles, ends_file, read_record, shard_file
from ._tokenizers import (
    TOKENIZER_FILE,
    CharTokenizer,
    Tokenizer,
    encode_all,
    load_tokenizer,
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
    *,
    shard_tokens: int = 2**26,
) -> TokenFiles:
    """Encode files of text into token files.

    A text file is one document, as is each line of a `.jsonl` file, its entry `"text"`;
    empty ones are left out. If the tokenizer has a token that ends documents, each gets it.
    The folder also gets the tokenizer, as `tokenizer.json`. Tokenizers of Hugging Face use
    all cores.

    If the folder has these tokens already, nothing is done. (Inputs are known by their
    names and sizes.)

    **Arguments:**

    - `inputs`: files of text, `.txt` or `.jsonl`, in UTF-8, and folders of them, whose
        files are taken in the order of their names.
    - `output`: the folder to write.
    - `tokenizer`: a tokenizer, or what [`eqxshard.data.text.load_tokenizer`][] takes;
        `"char"` takes the characters of all the inputs.
    - `shard_tokens`: about how many tokens a file gets.

    **Returns:**

    The [`eqxshard.data.text.TokenFiles`][].

    **Raises:**

    `FileNotFoundError` if there is no such input; `ValueError` if one is not text, there
    are no tokens, `shard_tokens` is not positive, or the folder has the tokens of other
    inputs, of another tokenizer or of another size.

    !!! Example

        ```python
        eqxshard.data.text.prepare("articles.jsonl", "prepared", "gpt2/tokenizer.json")
        ```
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be at least 1.")
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files, folder = _find(given), local_path(output, "output=")
    if tokenizer == "char":
        tokenizer = CharTokenizer(part.text for part in read_parts(files))
    elif not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    saved = folder / f"{TOKENIZER_FILE}.part"
    tokenizer.save(saved)
    settings = {
        "inputs": [[file.name, file.stat().st_size] for file in files],
        "tokenizer": hashlib.sha256(saved.read_bytes()).hexdigest(),
        "shard_tokens": shard_tokens,
    }
    if (folder / RECORD_FILE).exists():
        saved.unlink()
        _check_same(folder, settings)
    else:
        saved.replace(folder / TOKENIZER_FILE)
        shards = list(_write_shards(folder, read_parts(files), tokenizer, shard_tokens))
        record = {"vocab_size": tokenizer.vocab_size, "shards": shards, **settings}
        part = folder / f"{RECORD_FILE}.part"
        part.write_text(json.dumps(record, indent=2), encoding="utf-8")
        part.replace(folder / RECORD_FILE)
    return TokenFiles(folder)


def _check_same(folder: Path, settings: dict[str, object]) -> None:
    record = read_record(folder)
    differ = [name for name in settings if record.get(name) != settings[name]]
    if differ:
        raise ValueError(
            f"{folder} was prepared with other {' and '.join(differ)}; give another "
            "output, or delete it."
        )


def _write_shards(
    folder: Path, parts: Iterator[_Part], tokenizer: Tokenizer, shard_tokens: int
) -> Iterator[int]:
    """Write the token files, and yield how many tokens each has."""
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    arrays: list[np.ndarray] = []
    ends: list[int] = []
    count, numbers = 0, itertools.count()
    while group := list(itertools.islice(parts, _TOGETHER)):
        encoded = encode_all(tokenizer, [part.text for part in group])
        for part, tokens in zip(group, encoded):
            if part.ends and tokenizer.eos_id is not None:
                tokens = np.append(tokens, np.int32(tokenizer.eos_id))
            arrays.append(tokens.astype(dtype))
            count += len(tokens)
            # A document without tokens is none.
            if part.ends and ends[-1:] != [count]:
                ends.append(count)
            if count >= shard_tokens:
                yield _write(shard_file(folder, next(numbers)), arrays, ends)
                arrays, ends, count = [], [], 0
    if count:
        yield _write(shard_file(folder, next(numbers)), arrays, ends)


def _write(path: Path, arrays: list[np.ndarray], ends: list[int]) -> int:
    tokens = np.concatenate(arrays)
    np.save(path, tokens)
    np.save(ends_file(path), np.array(ends, np.uint64))
    return len(tokens)


def _find(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files of text at some paths, those of each folder in the order of their names."""
    files = []
    for path in map(Path, inputs):
        if not path.exists():
            raise FileNotFoundError(
                f"there is no input {path}; give files (.txt, .jsonl) or folders of them."
            )
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [file for file in found if file.suffix in _SUFFIXES]
        if not found:
            raise ValueError(
                f"{path} is not text; give files (.txt, .jsonl) or folders of them."
            )
        files += found
    if not files:
        raise ValueError("there are no inputs; give at least one file or folder.")
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
                raise ValueError(
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
            raise ValueError(
                f"{path} has no document in line {number}, or one that is not Unicode; "
                'give lines such as {"text": "..."}.'
            ) from None
        if text:
            yield _Part(text, True)
