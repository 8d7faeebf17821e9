"""Files of text: which there are, and the documents in them.

A *piece* is a part of a file that can be read, and encoded, by itself.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...sharding._files import open_file, parse_json

#: What a piece has of a file, about, in bytes.
PIECE_BYTES = 2**20
_SUFFIXES = (".txt", ".jsonl")
#: A line end with a text on both sides. Tokenizers of words or bytes do not join these.
_LINE_END = re.compile(rb"(?<=\S)\r?\n(?=\S)")
#: Where a text has none for many pieces, as with an empty line between all paragraphs. Some
#: tokenizers join several line ends unless they are cut apart: a token or two differ.
_LINE_ENDS = re.compile(rb"\n(?=\S)")
_MOST_PIECES = 16


class Piece(NamedTuple):
    """A part of a file, from a byte on: lines of JSON, or a part of one document."""

    path: Path
    start: int
    data: bytes
    #: Whether it has the last byte of its file.
    last: bool


class Document(NamedTuple):
    """A document's text, or a part of it."""

    text: str
    #: Whether its document begins here, and whether it ends here.
    begins: bool
    ends: bool


def find_inputs(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files of text at some paths, those of each folder in the order of their names."""
    files = []
    for path in map(Path, inputs):
        if not path.exists():
            raise FileNotFoundError(
                f"there is no input {path}; give files (.txt, .jsonl) or folders of them."
            )
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES)
        if not found or found[0].suffix not in _SUFFIXES:
            raise ValueError(
                f"{path} is not text; give files (.txt, .jsonl) or folders of them."
            )
        files += found
    if not files:
        raise ValueError("there are no inputs; give at least one file or folder.")
    return files


def pieces(files: Iterable[Path]) -> Iterator[Piece]:
    """The files in pieces, in order; always the same ones."""
    for path in files:
        with open_file(path) as file:
            start, rest, done = 0, b"", False
            while not done:
                cut, rest, done = _next(file, rest, path.suffix == ".jsonl")
                yield Piece(path, start, cut, done)
                start += len(cut)


def _next(file: BinaryIO, rest: bytes, is_jsonl: bool) -> tuple[bytes, bytes, bool]:
    """The next piece of a file, what was read beyond it, and whether it is the last."""
    while True:
        if is_jsonl:
            cut = rest.find(b"\n", PIECE_BYTES - 1) + 1
        else:
            found = _LINE_END.search(rest, PIECE_BYTES - 1)
            if found is None and len(rest) >= _MOST_PIECES * PIECE_BYTES:
                found = _LINE_ENDS.search(rest, PIECE_BYTES - 1)
            cut = found.end() if found else 0
        if cut:
            return rest[:cut], rest[cut:], False
        # As much again, so that one long line is not searched over and over.
        more = file.read(max(PIECE_BYTES, len(rest)))
        if not more:
            return rest, b"", True
        rest += more


def documents(piece: Piece) -> list[Document]:
    """The documents of a piece."""
    if piece.path.suffix != ".jsonl":
        text = decode_text(piece.data, piece.path, piece.start)
        return [Document(text, piece.start == 0, piece.last)]
    found, start = [], piece.start
    for line in piece.data.split(b"\n"):
        if line.strip():
            found.append(Document(_text_of(line, piece.path, start), True, True))
        start += len(line) + 1
    return found


def decode_text(data: bytes, path: Path, start: int = 0) -> str:
    """The text of a file's bytes from a byte on, its lines ended as on Unix."""
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in UTF-8 (at byte {start + error.start:,}); convert it "
            "first."
        ) from None


def _text_of(line: bytes, path: Path, start: int) -> str:
    text: Any = None
    try:
        record = parse_json(line)
        text = record.get("text") if isinstance(record, dict) else None
    except ValueError:
        pass
    if not isinstance(text, str):
        raise ValueError(
            f"{path} has no document in the line at byte {start:,}; give lines such as "
            '{"text": "..."}.'
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape half of a character: "\ud83d".
        raise ValueError(
            f"{path} has the lone surrogate {text[error.start]!r} in the line at byte "
            f"{start:,}, which is not text; replace it, by '\\ufffd' or the character that "
            "was meant."
        ) from None
    return text
