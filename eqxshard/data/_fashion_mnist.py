"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017, arXiv:1708.07747), real or generated."""

import functools
import gzip
import math
import os
from typing import Literal

import numpy as np
from jaxtyping import Float32, UInt8

from .._errors import UsageError
from ._datasets import dataset_folder, read_file
from ._sources import ArraySource

_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
_WARNING = (
    "Training on generated images, NOT on Fashion-MNIST: accuracies say nothing about the "
    "real data.\n\n"
)
_SIZES = {"train": 60_000, "test": 10_000}
_SIDE, _CLASSES = 28, 10
_CHUNK = 500  # images drawn at once, to stay in a core's cache

#: The SHA-256 of each file, by its name without `-ubyte.gz`.
_SHA256 = {
    "train-images-idx3": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


def fashion_mnist(
    split: str, *, data_dir: str | os.PathLike[str] | None = None
) -> ArraySource:
    """Fashion-MNIST: 28 x 28 grey images of ten kinds of clothing.

    The official files (`train-images-idx3-ubyte.gz` and so on) are read from the folder
    `fashion_mnist` of one directory: `data_dir` if given, else `$EQXSHARD_DATA_DIR` if set,
    else the user's cache directory. Missing files are downloaded there by
    [pooch](https://www.fatiando.org/pooch) (`pip install eqxshard[recipes]`).

    **Arguments:**

    - `split`: `"train"` (60,000 examples) or `"test"` (10,000).
    - `data_dir`: the directory to read from.

    **Returns:**

    An [`eqxshard.data.ArraySource`][] of `"image"`, uint8 of shape `(n, 28, 28)`, and
    `"label"`, int32 of shape `(n,)`, from 0 to 9.

    **Raises:**

    - `FileNotFoundError` if a file is missing and cannot be downloaded.
    - `ValueError` if there is no such split, or a file is damaged. A damaged file is never
        replaced silently.

    !!! Example

        ```python
        source = eqxshard.data.fashion_mnist("train")
        batch = source.gather(np.arange(256))
        ```
    """
    _check_split(split)
    count, prefix = _SIZES[split], {"train": "train", "test": "t10k"}[split]
    image = _read(f"{prefix}-images-idx3", (count, _SIDE, _SIDE), data_dir)
    label = _read(f"{prefix}-labels-idx1", (count,), data_dir)
    arrays = {"image": image, "label": label.astype(np.int32)}
    return ArraySource(arrays, name="fashion_mnist", unit="images")


def _read(
    name: str, shape: tuple[int, ...], data_dir: str | os.PathLike[str] | None
) -> UInt8[np.ndarray, "..."]:
    file = f"{name}-ubyte.gz"
    path = dataset_folder(data_dir) / "fashion_mnist" / file
    data = gzip.decompress(read_file(path, f"{_URL}/{file}", _SHA256[name]))
    # The IDX format: a header, and then the bytes of one array.
    return np.frombuffer(data[-math.prod(shape) :], np.uint8).reshape(shape)


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
        raise UsageError(
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


def synthetic_fashion(split: str, *, seed: int = 0, size: int | None = None) -> ArraySource:
    """A generated replacement for [`eqxshard.data.fashion_mnist`][], for tests and demos.

    Images of ten classes, in the same shapes and dtypes: each is the template of its class,
    mixed with that of another, moved by up to two pixels, plus noise. Accuracies on it say
    nothing about the real dataset.

    **Arguments:**

    - `split`: `"train"` (60,000 examples) or `"test"` (10,000), drawn independently.
    - `seed`: the same seed gives the same images.
    - `size`: another number of examples.

    **Returns:**

    An [`eqxshard.data.ArraySource`][] of `"image"`, uint8 of shape `(n, 28, 28)`, and
    `"label"`, int32 of shape `(n,)`. The classes have equal numbers of examples (give or
    take one if `size` is not a multiple of ten).

    **Raises:**

    `ValueError` if there is no such split, or `size` is not positive.

    !!! Example

        ```python
        source = eqxshard.data.synthetic_fashion("train", seed=1)
        ```
    """
    _check_split(split)
    size = _SIZES[split] if size is None else size
    if size < 1:
        raise UsageError(f"size={size} must be at least 1.")
    rng = np.random.default_rng([seed, list(_SIZES).index(split)])
    label = rng.permutation(np.arange(size, dtype=np.int32) % _CLASSES)
    image = np.empty((size, _SIDE, _SIDE), np.uint8)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        image[chunk] = _draw(rng, label[chunk])
    arrays = {"image": image, "label": label}
    return ArraySource(arrays, name="synthetic", unit="images")


def _check_split(split: str) -> None:
    if split not in _SIZES:
        raise UsageError(f"split={split!r} is not 'train' or 'test'; give one of them.")


def _draw(rng: np.random.Generator, label: np.ndarray) -> Float32[np.ndarray, "n 28 28"]:
    """Images of some classes, from 0 to 255."""
    templates, count = _templates(), len(label)
    moved = rng.integers(len(templates), size=count)
    other = rng.integers(_CLASSES, size=count)
    share = rng.uniform(0.3, 1, (count, 1, 1)).astype(np.float32)
    clean = share * templates[moved, label] + (1 - share) * templates[moved, other]
    noise = rng.standard_normal(clean.shape, np.float32)
    return np.clip(220 * clean + 40 * noise, 0, 255)


@functools.cache
def _templates() -> Float32[np.ndarray, "moves classes 28 28"]:
    """An image for each class, from 0 to 1: a few smooth spots, moved a little."""
    rng = np.random.default_rng(0)
    y, x, width = rng.uniform((6, 6, 2), (22, 22, 5), (_CLASSES, 4, 3)).transpose(2, 0, 1)
    pixels = np.arange(_SIDE)
    in_y, in_x = (
        np.exp(-(((pixels - place[..., None]) / width[..., None]) ** 2)) for place in (y, x)
    )
    spots = np.clip(np.einsum("csy,csx->cyx", in_y, in_x), 0, 1).astype(np.float32)
    moves = [(down, right) for down in range(-2, 3) for right in range(-2, 3)]
    return np.stack([np.roll(spots, move, (1, 2)) for move in moves])
