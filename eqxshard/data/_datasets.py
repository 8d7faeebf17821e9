"""The files of known datasets: where they are, and how they are downloaded, by pooch."""

import hashlib
import os
from pathlib import Path

import platformdirs

from .._errors import UsageError, UsageFileError
from ..sharding._files import local_path


def dataset_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of datasets: as given, or `$EQXSHARD_DATA_DIR`, or the user's cache."""
    directory = data_dir or os.environ.get("EQXSHARD_DATA_DIR")
    directory = directory or platformdirs.user_cache_dir("eqxshard")
    return local_path(directory, "the folder of the data ($EQXSHARD_DATA_DIR)")


def read_file(path: Path, url: str, sha256: str) -> bytes:
    """The content of a file, which is first downloaded if it is missing.

    **Arguments:**

    - `path`: the file. Its folder is created if necessary.
    - `url`: where to download it from.
    - `sha256`: the SHA-256 of the file, in hexadecimal.

    **Raises:**

    `FileNotFoundError` if the file is missing and cannot be downloaded; `ValueError` if it
    is damaged, in which case it stays as it is.
    """
    if not path.is_file():
        _download(path, url, sha256)
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise UsageError(
            f"{path} is damaged: its SHA-256 is {found}, not {sha256}; delete it to "
            "download it again."
        )
    return data


def _download(path: Path, url: str, sha256: str) -> None:
    try:
        # Imported here because it is optional, and most programs download nothing.
        import pooch

        pooch.retrieve(url, f"sha256:{sha256}", path.name, path.parent)
    except (ImportError, OSError, ValueError) as error:
        raise UsageFileError(
            f"there is no {path}, and it could not be downloaded from {url} "
            f"({error!s:.120}); put the file there, set data_dir or $EQXSHARD_DATA_DIR to "
            "the directory that has it, or pip install 'eqxshard[recipes]' for the "
            "download."
        ) from error
