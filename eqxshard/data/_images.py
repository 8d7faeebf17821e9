"""Images in folders, one for each class."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from ..sharding._files import open_file
from ._sources import RecordSource

if TYPE_CHECKING:
    from PIL.Image import Image

#: The ends of the names of files that are read.
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class ImageFolder:
    """Images in a folder that has a folder for each class.

    An example has an `"image"` of type uint8 and shape `[height, width, 3]`, and a
    `"label"`, its class. Images are decoded in threads, by
    [Pillow](https://pillow.readthedocs.io) (`pip install eqxshard[images]`); the `workers`
    of [`eqxshard.Loader`][] decode in more processes. Of 16 bits the upper 8 are kept.
    Random crops and mirror images are for an [`eqxshard.data.RandomTransform`][].

    The attribute `classes` has the names of the classes, in the order of their numbers, and
    `files` the path and the class of each example.

    **Arguments:**

    - `path`: the folder. Each folder in it is a class, and is searched with all folders in
        it for files whose names end as those of images do. Classes are numbered from 0, in
        the order of their names.
    - `size`: the height and width of the examples, or one number for both. Images are
        scaled until they just cover that, and lose what sticks out at two opposite edges.
    - `threads`: the number of images to decode at a time.

    **Raises:**

    `ImportError` without Pillow. `ValueError` if the folder has no images in folders, or a
    number is not positive. While reading, `ValueError` if a file cannot be decoded or
    has pixels of 32 bits.

    !!! Example

        ```python
        source = eqxshard.data.ImageFolder("imagenet/train", size=256)
        loader = eqxshard.Loader(source, batch_size=256, mesh=mesh, workers=8)
        ```
    """

    def __init__(self, path: str | Path, *, size: int | tuple[int, int], threads: int = 16):
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width) < 1:
            raise ValueError(f"size={size} must be at least 1.")
        try:
            importlib.import_module("PIL.Image")
        except ImportError as error:
            raise ImportError(
                "images are decoded by Pillow; pip install 'eqxshard[images]'."
            ) from error
        root = Path(path)
        folders = sorted(x for x in root.iterdir() if x.is_dir()) if root.is_dir() else []
        self.classes = [folder.name for folder in folders]
        self.files = [
            (str(file), label)
            for label, folder in enumerate(folders)
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not self.files:
            raise ValueError(
                f"{root} has no images in folders; give a folder that has a folder of "
                f"images for each class ({', '.join(_SUFFIXES)})."
            )
        self._size = width, height
        self._records = RecordSource(self.files, self._read, threads=threads)

    def __len__(self) -> int:
        return len(self.files)

    def gather(self, indices: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """The examples at some indices, in that order; indices may repeat."""
        return self._records.gather(indices)

    def __repr__(self) -> str:
        width, height = self._size
        classes = len(self.classes)
        return (
            f"ImageFolder({len(self):,} x uint8[{height}, {width}, 3], {classes} classes)"
        )

    def _read(self, record: tuple[str, int]) -> dict[str, Any]:
        from PIL import Image, ImageOps

        file, label = record
        try:
            with open_file(file) as stream, Image.open(stream) as image:
                # Has JPEGs decoded at a half, a quarter or an eighth of their size, if
                # that is enough.
                image.draft("RGB", self._size)
                pixels = _to_rgb(image)
        # A damaged file, or one made to do harm, can make Pillow raise anything.
        except Exception as error:
            raise ValueError(
                f"{file} cannot be decoded ({error}); replace it or remove it."
            ) from error
        if pixels is None:
            raise ValueError(
                f"{file} has pixels of 32 bits (Pillow's mode {image.mode}), whose range "
                "is unknown; convert it to 8 bits, or remove it."
            )
        if pixels.size != self._size:
            pixels = ImageOps.fit(pixels, self._size, Image.Resampling.BILINEAR)
        return {"image": np.asarray(pixels), "label": np.int32(label)}


def _to_rgb(image: "Image") -> "Image | None":
    """An image in colour, of 8 bits; Pillow alone would clip grey values above 255.

    `None` if its pixels have 32 bits.
    """
    from PIL import Image

    if image.mode == "I" or image.mode.startswith("I;16"):
        image.load()
        pixels = np.asarray(image)
        # PNGs and PGMs of 16 bits may have the mode I, and 32-bit TIFFs have it.
        if pixels.min() >= 0 and pixels.max() < 2**16:
            return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    elif image.mode != "F":
        return image.convert("RGB")
    return None
