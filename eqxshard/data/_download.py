"""Downloads: checked, resumable, and in place only when complete."""

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

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

_TIMEOUT = 10.0  # seconds, to connect and for each read
_CHUNK = 1 << 16


class _MirrorError(Exception):
    """One mirror did not deliver; another may."""


def download(path: Path, urls: Sequence[str], *, sha256: str) -> None:
    """Put a file at `path`, from the first of `urls` that delivers it.

    What an interrupted download leaves is in `<path>.part`, and the next one goes on
    from there, whichever mirror it uses. `path` itself appears only when complete.

    **Arguments:**

    - `path`: where the file goes; its folder is made if need be.
    - `urls`: its mirrors, in the order to try them.
    - `sha256`: what the file's SHA-256 must be, in hexadecimal.

    **Raises:**

    `ConnectionError` if no mirror delivers the file, with what each of them said; any
    other `OSError` if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    left_over = path.with_name(f"{path.name}.part")
    # Two processes may download at once, so each writes to a file of its own. Renaming is
    # atomic: a left-over part goes to one of them.
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
        raise _MirrorError(f"what it sent has SHA-256 {found}, not {sha256}")
    # What was left over may be at fault rather than this mirror.
    _fetch_checked(url, part, sha256)


def _fetch(url: str, part: Path) -> None:
    """Append what `part` lacks, or write all of it where the server cannot resume."""
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


def _progress(url: str) -> Progress:
    """A bar on a terminal; elsewhere one line, for logs."""
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
