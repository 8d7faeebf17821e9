"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747)."""

import gzip
import math
import os
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8

from ._download import dataset_folder, mirrors, read_file
from ._planning import is_planning
from ._sources import ArraySource
from ._synthetic import synthetic_fashion

_FOLDER = "fashion_mnist"
_MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_WARNING = (
    "Training on generated images, NOT on Fashion-MNIST: accuracies say nothing about the "
    "real data.\n\n"
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
    itself. Missing files are downloaded into that folder by
    [pooch](https://www.fatiando.org/pooch) (`pip install eqxshard[recipes]`), from the
    official mirrors or from `$EQXSHARD_FASHION_MNIST_URL`, the base URL of another copy.

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
        raise ValueError(f"split={split!r} is not 'train' or 'test'; give one of them.")
    directory = dataset_folder(data_dir)
    arrays = {
        name: _read(file, directory, download) for name, file in _FILES[split].items()
    }
    arrays["label"] = arrays["label"].astype(np.int32)
    return ArraySource(arrays, name="fashion_mnist", unit="images")


def _read(file: _File, directory: Path, download: bool) -> UInt8[np.ndarray, "..."]:
    if is_planning():
        return np.zeros(file.shape, np.uint8)
    path = directory / _FOLDER / file.name
    if not path.is_file() and (directory / file.name).is_file():
        path = directory / file.name
    bases = mirrors("EQXSHARD_FASHION_MNIST_URL", _MIRRORS)
    urls = [f"{base.rstrip('/')}/{file.name}" for base in bases]
    data = gzip.decompress(read_file(path, urls, file.sha256, download=download))
    # The IDX format: a header, and then the bytes of one array.
    return np.frombuffer(data[-math.prod(file.shape) :], np.uint8).reshape(file.shape)


def load_fashion_mnist(
    data: Literal["auto", "fashion_mnist", "synthetic"] = "auto",
    *,
    data_dir: str | os.PathLike[str] | None = None,
) -> tuple[ArraySource, ArraySource]:
    """The training and test data of Fashion-MNIST, or of its generated replacement.

    **Arguments:**

    - `data`: `"fashion_mnist"` for the real data, `"synthetic"` for
        [`eqxshard.data.synthetic_fashion`][], `"auto"` for the latter only if the real
        data are not available. Synthetic data have a `warning`, which
        [`eqxshard.train`][] shows.
    - `data_dir`: as for [`eqxshard.data.fashion_mnist`][].

    **Returns:**

    Two [`eqxshard.data.ArraySource`][]s of `"image"` and `"label"`.

    **Raises:**

    As [`eqxshard.data.fashion_mnist`][] does; `ValueError` if `data` is not one of these.

    !!! Example

        ```python
        train_data, test_data = eqxshard.data.load_fashion_mnist("synthetic")
        ```
    """
    if data not in ("auto", "fashion_mnist", "synthetic"):
        raise ValueError(
            f"data={data!r} is unknown; use 'auto', 'fashion_mnist' or 'synthetic'."
        )
    reason = "Requested with data='synthetic'."
    if data != "synthetic":
        try:
            train = fashion_mnist("train", data_dir=data_dir)
            return train, fashion_mnist("test", data_dir=data_dir)
        except FileNotFoundError as error:
            if data == "fashion_mnist":
                raise
            reason = str(error)
    train, test = synthetic_fashion("train"), synthetic_fashion("test")
    train.warning = test.warning = _WARNING + reason
    return train, test
