"""Downloads that try several mirrors, resume, and check the result.

Written here because pooch and fsspec start again from zero after an interrupted transfer,
and do not try other mirrors.
"""

import contextlib
import hashlib
import os
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from ..sharding._paths import local_path

if TYPE_CHECKING:
    from rich.progress import Progress

#: Seconds to wait for a connection, and for each read.
_TIMEOUT = 10.0
#: Bytes to read at once.
_CHUNK = 2**16


class _MirrorError(Exception):
    """One mirror failed; another may not."""


def dataset_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Where datasets are: as given, in `$EQXSHARD_DATA_DIR`, or in the user's cache."""
    directory = data_dir or os.environ.get("EQXSHARD_DATA_DIR")
    directory = directory or platformdirs.user_cache_dir("eqxshard")
    return local_path(directory, "the folder of the data ($EQXSHARD_DATA_DIR)")


def mirrors(variable: str, default: Sequence[str]) -> Sequence[str]:
    """The URLs to download from: that of an environment variable, or the default ones."""
    url = os.environ.get(variable)
    if not url:
        return default
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"${variable} is {url!r}; make it an http:// or https:// URL.")
    return (url,)


def download(path: Path, urls: Sequence[str], *, sha256: str) -> None:
    """Download a file to `path`, from the first mirror that has it.

    An interrupted download leaves its data in `<path>.part`, and the next one resumes from
    there, with any mirror. `path` itself appears only once it is complete.

    **Arguments:**

    - `path`: the file to write. Its folder is created if necessary.
    - `urls`: its mirrors, in the order to try them.
    - `sha256`: the SHA-256 of the file, in hexadecimal.

    **Raises:**

    `ConnectionError` if no mirror has the file, with the error of each; any other
    `OSError` if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    left_over = path.with_name(f"{path.name}.part")
    # Two processes may download at once, so each writes to its own file. Renaming is
    # atomic, so only one of them takes over a left-over part.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    with contextlib.suppress(FileNotFoundError):
        left_over.replace(part)
    failures = []
    try:
        for url in urls:
            try:
                _fetch_checked(url, part, sha256)
            except _MirrorError as error:
                failures.append(f"{url}: {error}")
            else:
                part.replace(path)
                return
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.replace(left_over)
    raise ConnectionError("; ".join(failures))


def _fetch_checked(url: str, part: Path, sha256: str) -> None:
    resuming = part.exists()
    _fetch(url, part)
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == sha256:
        return
    part.unlink()
    if not resuming:
        raise _MirrorError(f"the file has SHA-256 {found}, not {sha256}")
    # The left-over part may be to blame, not this mirror.
    _fetch_checked(url, part, sha256)


def _fetch(url: str, part: Path) -> None:
    """Append the rest of a file to `part`, or all of it if the server cannot resume."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            part.unlink()
            return _fetch(url, part)
        raise _MirrorError(f"HTTP status {error.code} ({error.reason})") from error
    except (OSError, HTTPException) as error:
        raise _MirrorError(str(getattr(error, "reason", error))) from error
    with response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            start = 0
        total = None if response.length is None else start + response.length
        with part.open("ab" if start else "wb") as file:
            with _progress(url) as progress:
                task = progress.add_task(
                    url.rpartition("/")[2], total=total, completed=start
                )
                for chunk in _chunks(response):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
            received = file.tell()
            os.fsync(file.fileno())
    if total is not None and received < total:
        raise _MirrorError(f"the connection closed after {received:,} of {total:,} bytes")


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, HTTPException) as error:
            raise _MirrorError(f"the connection broke ({error})") from error
        if not chunk:
            return
        yield chunk


def _progress(url: str) -> "Progress":
    """A bar on a terminal; otherwise one line, for logs."""
    # Imported here because most programs download nothing.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"downloading {url}", file=sys.stderr)
    return Progress(
        TextColumn("downloading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
