"""Preparation: from files of text to token files, in all cores, resumed after a kill."""

import hashlib
import itertools
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from ...distributed import count_cores
from ...sharding._paths import local_path
from ._inputs import Piece, documents, find_inputs, pieces
from ._token_files import (
    RECORD_FILE,
    SUFFIX,
    TokenFiles,
    read_header,
    read_record,
    write_tokens,
)
from ._tokenizers import TOKENIZER_FILE, CharTokenizer, Tokenizer, load_tokenizer

#: Bytes of input for which another process is worth its start.
_WORKER_BYTES = 2**23


class _Encoded(NamedTuple):
    """The tokens of a piece of the input."""

    tokens: np.ndarray
    #: Where documents end among them.
    ends: Int64[np.ndarray, " documents"]
    #: How many bytes were read for them.
    nbytes: int


def prepare(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str] | Tokenizer,
    *,
    shard_tokens: int = 2**26,
    workers: int | None = None,
) -> TokenFiles:
    """Encode files of text into token files.

    A text file is one document, as is each line of a `.jsonl` file, its entry `"text"`. If
    the tokenizer has a token that ends documents, each gets it. The folder also gets the
    tokenizer, as `tokenizer.json`.

    Files appear once they are complete. If the preparation is stopped, even killed, the
    same call resumes it, and the files are the same, byte by byte, for any number of
    workers. If it is complete, nothing is done. (Inputs are known by their names and
    sizes.)

    **Arguments:**

    - `inputs`: files of text, `.txt` or `.jsonl`, in UTF-8, and folders of them, whose
        files are taken in the order of their names.
    - `output`: the folder to write.
    - `tokenizer`: a tokenizer, or what [`eqxshard.data.text.load_tokenizer`][] takes;
        `"char"` takes the characters of all the inputs.
    - `shard_tokens`: about how many tokens a file gets.
    - `workers`: the number of processes; by default one for each core, or fewer for small
        inputs. With 1, this process does the work. (A script that uses more keeps its own
        work below `if __name__ == "__main__":`.)

    **Returns:**

    The [`eqxshard.data.text.TokenFiles`][].

    **Raises:**

    `FileNotFoundError` if there is no such input; `ValueError` if one is not text, there
    are no tokens, a number is not positive, or the folder has the tokens of other inputs,
    of another tokenizer or of other sizes.

    !!! Example

        ```python
        eqxshard.data.text.prepare("articles.jsonl", "prepared", "gpt2/tokenizer.json")
        ```
    """
    for name, value in {"shard_tokens": shard_tokens, "workers": workers}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    files, folder = find_inputs(given), local_path(output, "output=")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = _load(tokenizer, files)
    sizes = [file.stat().st_size for file in files]
    folder.mkdir(parents=True, exist_ok=True)
    record = _claim(folder, files, sizes, tokenizer, shard_tokens)
    shards = _complete_shards(folder)
    if record["shards"] != len(shards):
        if workers is None:
            workers = min(count_cores(), 1 + sum(sizes) // _WORKER_BYTES)
        _write_shards(folder, files, tokenizer, shard_tokens, workers, shards)
        shards = _complete_shards(folder)
        _write_record(folder, record | {"shards": len(shards)})
    return TokenFiles(folder)


def _load(tokenizer: str | os.PathLike[str], files: list[Path]) -> Tokenizer:
    if tokenizer != "char":
        return load_tokenizer(tokenizer)
    chars: set[str] = set()
    for piece in pieces(files):
        for document in documents(piece):
            chars.update(document.text)
    return CharTokenizer(chars)


def _claim(
    folder: Path,
    files: list[Path],
    sizes: list[int],
    tokenizer: Tokenizer,
    shard_tokens: int,
) -> dict[str, Any]:
    """The record of a folder, which must be of this preparation, or new."""
    record = None
    with suppress(FileNotFoundError):
        record = read_record(folder)
    saved = folder / TOKENIZER_FILE
    part = folder / f"{TOKENIZER_FILE}.part"
    tokenizer.save(part)
    settings = {
        "inputs": [[file.name, size] for file, size in zip(files, sizes)],
        "tokenizer": hashlib.sha256(part.read_bytes()).hexdigest(),
        "shard_tokens": shard_tokens,
    }
    if record is None:
        record = settings | {"shards": None}
        if any(folder.glob(f"*{SUFFIX}")):
            record["inputs"] = "unknown"
    differ = [name for name in settings if record.get(name) != settings[name]]
    if differ:
        part.unlink()
        raise ValueError(
            f"{folder} was prepared otherwise (in its {' and '.join(differ)}); give "
            "another output, or delete it."
        )
    part.replace(saved)
    _write_record(folder, record)
    return record


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    part = folder / f"{RECORD_FILE}.part"
    part.write_text(json.dumps(record, indent=2), encoding="utf-8")
    part.replace(folder / RECORD_FILE)


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05}{SUFFIX}"


def _complete_shards(folder: Path) -> list[Path]:
    """The token files up to the first that is missing."""
    shards = (_shard(folder, number) for number in itertools.count())
    return list(itertools.takewhile(Path.exists, shards))


def _write_shards(
    folder: Path,
    files: list[Path],
    tokenizer: Tokenizer,
    shard_tokens: int,
    workers: int,
    shards: list[Path],
) -> None:
    """Write the token files that are not there yet."""
    done = read_header(shards[-1]).pieces if shards else 0
    number = len(shards)
    held: list[_Encoded] = []
    all_pieces = pieces(files)
    with _progress(sum(file.stat().st_size for file in files)) as advance:
        for piece in itertools.islice(all_pieces, done):
            advance(len(piece.data))
        with closing(_encode_all(all_pieces, tokenizer, workers)) as encoded:
            for found in encoded:
                held.append(found)
                done += 1
                advance(found.nbytes)
                if sum(len(part.tokens) for part in held) >= shard_tokens:
                    _write(_shard(folder, number), held, tokenizer.vocab, done)
                    number, held = number + 1, []
    if any(len(part.tokens) for part in held) or not number:
        _write(_shard(folder, number), held, tokenizer.vocab, done)


def _write(path: Path, parts: list[_Encoded], vocab: int, done: int) -> None:
    tokens = np.concatenate([part.tokens for part in parts])
    before = np.cumsum([0, *(len(part.tokens) for part in parts)])
    ends = np.concatenate([first + part.ends for first, part in zip(before, parts)])
    write_tokens(path, tokens, ends, vocab=vocab, pieces=done)


def _encode_all(
    inputs: Iterable[Piece], tokenizer: Tokenizer, workers: int
) -> Generator[_Encoded, None, None]:
    """The tokens of all pieces, in order."""
    if workers == 1:
        yield from (encode(piece, tokenizer) for piece in inputs)
        return
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_start_worker, initargs=(tokenizer,)
    )
    waiting: deque[Future[_Encoded]] = deque()
    try:
        for piece in inputs:
            waiting.append(pool.submit(_encode_in_worker, piece))
            if len(waiting) > 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def encode(piece: Piece, tokenizer: Tokenizer) -> _Encoded:
    """The tokens of a piece, in the smallest type that holds the vocabulary."""
    parts: list[np.ndarray] = []
    ends: list[int] = []
    count = 0
    for document in documents(piece):
        tokens = tokenizer.encode(document.text)
        if document.begins and document.ends and not len(tokens):
            continue
        if document.ends and tokenizer.end is not None:
            tokens = np.append(tokens, np.int32(tokenizer.end))
        parts.append(tokens)
        count += len(tokens)
        if document.ends:
            ends.append(count)
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    dtype = np.min_scalar_type(tokenizer.vocab - 1)
    return _Encoded(tokens.astype(dtype), np.array(ends, np.int64), len(piece.data))


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    # Ctrl-C reaches all processes; the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process with the one that started it, which may have been killed."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(piece: Piece) -> _Encoded:
    assert _worker_tokenizer is not None
    return encode(piece, _worker_tokenizer)


@contextmanager
def _progress(total: int) -> Generator[Callable[[int], None], None, None]:
    """A bar of so many bytes, on a terminal; the function that moves it."""
    # Imported here because most programs prepare no text.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
