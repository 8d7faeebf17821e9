"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747)."""

import hashlib
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from .._download import dataset_folder, mirrors
from .._download import download as download_file
from .._planning import is_planning
from .._sources import ArraySource
from ._idx import gunzip, parse_idx

_FOLDER = "fashion_mnist"
_MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)


class _File(NamedTuple):
    """A file: its name, the shape of its array, and its SHA-256, compressed."""

    name: str
    shape: tuple[int, ...]
    sha256: str


_FILES = {
    "train": {
        "image": _File(
            "train-images-idx3-ubyte.gz",
            (60_000, 28, 28),
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        "label": _File(
            "train-labels-idx1-ubyte.gz",
            (60_000,),
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
    },
    "test": {
        "image": _File(
            "t10k-images-idx3-ubyte.gz",
            (10_000, 28, 28),
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        "label": _File(
            "t10k-labels-idx1-ubyte.gz",
            (10_000,),
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    },
}


def fashion_mnist(
    split: str, *, data_dir: str | os.PathLike[str] | None = None, download: bool = True
) -> ArraySource:
    """Fashion-MNIST: 28 x 28 grey images of ten kinds of clothing.

    The official files (`train-images-idx3-ubyte.gz` and so on) are read from one
    directory: `data_dir` if given, else `$EQXSHARD_DATA_DIR` if set, else the user's cache
    directory. They are looked for in its folder `fashion_mnist`, then in the directory
    itself. Missing files are downloaded into that folder, from the official mirrors or
    from `$EQXSHARD_FASHION_MNIST_URL`, the base URL of another copy. An interrupted
    download resumes where it stopped.

    **Arguments:**

    - `split`: `"train"` (60,000 examples) or `"test"` (10,000).
    - `data_dir`: the directory to read from.
    - `download`: whether to download missing files.

    **Returns:**

    An [`eqxshard.data.ArraySource`][] of `"image"`, uint8 of shape `(n, 28, 28)`, and
    `"label"`, int32 of shape `(n,)`, from 0 to 9.

    **Raises:**

    - `FileNotFoundError` if a file is missing, and is not or cannot be downloaded.
    - `ValueError` if there is no such split, or a file is damaged. A damaged file is never
        replaced silently.

    !!! Example

        ```python
        source = eqxshard.data.fashion_mnist("train")
        batch = source.gather(np.arange(256))
        ```
    """
    if split not in _FILES:
        raise ValueError(f"split={split!r} is not 'train' or 'test'.")
    directory = dataset_folder(data_dir)
    image, label = (
        _open(file, directory, download)
        for file in (_FILES[split]["image"], _FILES[split]["label"])
    )
    arrays = {"image": image, "label": label.astype(np.int32)}
    return ArraySource(arrays, name="fashion_mnist", unit="images")


def _open(file: _File, directory: Path, download: bool) -> UInt8[np.ndarray, "..."]:
    if is_planning():
        return np.zeros(file.shape, np.uint8)
    return _read(_find(file, directory) or _fetch(file, directory, download), file)


def _find(file: _File, directory: Path) -> Path | None:
    paths = (directory / _FOLDER / file.name, directory / file.name)
    return next((path for path in paths if os.path.isfile(path)), None)


def _fetch(file: _File, directory: Path, download: bool) -> Path:
    path = directory / _FOLDER / file.name
    if not download:
        raise FileNotFoundError(
            f"{file.name} is neither in {path.parent} nor in {directory}; set data_dir or "
            "$EQXSHARD_DATA_DIR to its directory, or pass download=True."
        )
    bases = mirrors("EQXSHARD_FASHION_MNIST_URL", _MIRRORS)
    urls = [f"{base.rstrip('/')}/{file.name}" for base in bases]
    try:
        download_file(path, urls, sha256=file.sha256)
    except OSError as error:
        raise FileNotFoundError(
            f"{file.name} is neither in {path.parent} nor in {directory}, and could not "
            f"be downloaded ({error}); put the official file there, or set data_dir or "
            "$EQXSHARD_DATA_DIR to its directory."
        ) from error
    return path


def _read(path: Path, file: _File) -> UInt8[np.ndarray, "..."]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileNotFoundError(
            f"{path} cannot be read ({error.strerror}); make it readable, or set data_dir "
            "or $EQXSHARD_DATA_DIR to another copy."
        ) from error
    try:
        # The digest comes last, because the other errors are more specific.
        # A header is short. What is a little too long, the parser describes better.
        array = parse_idx(gunzip(data, 2**16 + math.prod(file.shape)), file.shape)
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256:
            raise ValueError(f"its SHA-256 is {found}, not {file.sha256}")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}; delete it to download it again."
        ) from error
    return array
