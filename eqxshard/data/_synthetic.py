"""A generated replacement for Fashion-MNIST: a template for each class, and noise."""

import functools

import numpy as np
from jaxtyping import Float32

from ._planning import is_planning
from ._sources import ArraySource

_SIDE, _CLASSES = 28, 10
_SIZES = {"train": 60_000, "test": 10_000}
_CHUNK = 500  # images drawn at once, to stay in a core's cache


def synthetic_fashion(split: str, *, seed: int = 0, size: int | None = None) -> ArraySource:
    """A generated replacement for [`eqxshard.data.fashion_mnist`][], for tests and demos.

    Images of ten classes, in the same shapes and dtypes: each is the template of its class,
    mixed with that of another, moved by up to two pixels, and noise. Accuracies on it say
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
    if split not in _SIZES:
        raise ValueError(f"split={split!r} is not 'train' or 'test'; give one of them.")
    size = _SIZES[split] if size is None else size
    if size < 1:
        raise ValueError(f"size={size} must be at least 1.")
    rng = np.random.default_rng([seed, list(_SIZES).index(split)])
    label = rng.permutation(np.arange(size, dtype=np.int32) % _CLASSES)
    image = np.zeros((size, _SIDE, _SIDE), np.uint8)
    # Planning needs only shapes.
    for start in range(0, 0 if is_planning() else size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        image[chunk] = _draw(rng, label[chunk])
    arrays = {"image": image, "label": label}
    return ArraySource(arrays, name="synthetic", unit="images")


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
