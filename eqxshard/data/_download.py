"""Files of datasets, downloaded once by pooch from the first mirror that has them."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import platformdirs

from ..sharding._paths import local_path

#: Seconds to wait for a connection, and for each read.
_TIMEOUT = 10.0


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


def read_file(
    path: Path, urls: Sequence[str], sha256: str, *, download: bool = True
) -> bytes:
    """The content of a file, which is downloaded first if it is missing.

    **Arguments:**

    - `path`: the file. Its folder is created if necessary.
    - `urls`: its mirrors, in the order to try them.
    - `sha256`: the SHA-256 of the file, in hexadecimal.
    - `download`: whether to download a missing file.

    **Raises:**

    `FileNotFoundError` if the file is missing and no mirror has it; `ValueError` if it is
    damaged, in which case it stays as it is.
    """
    if not path.is_file():
        _download(path, urls if download else (), sha256)
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {found}, not {sha256}; delete it to "
            "download it again."
        )
    return data


def _download(path: Path, urls: Sequence[str], sha256: str) -> None:
    failures = []
    for url in urls:
        try:
            # Imported here because it is optional, and most programs download nothing.
            import pooch

            downloader = pooch.HTTPDownloader(timeout=_TIMEOUT)
            known = f"sha256:{sha256}"
            pooch.retrieve(
                url,
                known,
                path.name,
                path.parent,
                downloader=downloader,  # pyright: ignore[reportArgumentType]
            )
            return
        except ImportError:
            failures = ["it needs pooch: pip install 'eqxshard[recipes]'"]
            break
        except OSError as error:
            failures.append(f"{url}: {error}")
        except ValueError:
            failures.append(f"{url}: its file has another SHA-256 than {sha256}")
    reason = f", and it could not be downloaded ({', '.join(failures)})" if failures else ""
    raise FileNotFoundError(
        f"there is no {path}{reason}; put the official file there, or set data_dir or "
        "$EQXSHARD_DATA_DIR to the directory that has it."
    )
