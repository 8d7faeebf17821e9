"""The gallery's data: Fashion-MNIST, also in colour like CIFAR-10; or CIFAR-10 itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

import eqxshard

GARMENTS = ["t-shirt", "trousers", "pullover", "dress", "coat"]
GARMENTS += ["sandal", "shirt", "sneaker", "bag", "boot"]
CIFAR = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Coloured:
    """Garments in a random colour, at a random place in 32x32 pixels of another colour.

    An image has the same colours and the same place in every epoch.
    """

    def __init__(self, source: Any, seed: int):
        rng = np.random.default_rng(seed)
        self.source = source
        self.warning = source.warning
        self.name, self.unit = f"coloured {source.name}", "images"
        self.colors = rng.integers(0, 256, size=(len(source), 2, 1, 1, 3))
        self.places = rng.integers(0, 5, size=(len(source), 2))

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = self.source.gather(indices)
        cover = np.zeros((len(indices), 32, 32, 1))
        for canvas, image, (top, left) in zip(cover, batch["image"], self.places[indices]):
            canvas[top : top + 28, left : left + 28, 0] = image / 255
        ground, garment = np.moveaxis(self.colors[indices], 1, 0)
        image = ground + cover * (garment - ground)
        return {"image": image.astype(np.uint8), "label": batch["label"]}


# Without a prefix: --data instead of --garments.data.
@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class Garments:
    """The garments of Fashion-MNIST."""

    data: Literal["auto", "fashion_mnist", "synthetic"] = "auto"
    """auto: the real images or, if they cannot be downloaded, generated ones."""

    def load(self) -> tuple[Any, Any]:
        """The training data and the test data."""
        return eqxshard.data.load_fashion_mnist(self.data)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)
@dataclass(frozen=True)
class Images:
    """Coloured garments, or CIFAR-10."""

    garments: Garments = Garments()
    cifar: Annotated[str | None, eqxshard.run.default("garments", "DIR")] = None
    """Use CIFAR-10 instead, from the folder of its binary version."""

    @property
    def names(self) -> list[str]:
        """The names of the labels."""
        return CIFAR if self.cifar else GARMENTS

    def load(self, tests: int = 2000) -> tuple[Any, Any]:
        """All training data, and the first `tests` examples of the test data."""
        if self.cifar:
            train_data = read_cifar(
                self.cifar, [f"data_batch_{number}.bin" for number in range(1, 6)]
            )
            test_data = read_cifar(self.cifar, ["test_batch.bin"])
            return train_data, first(test_data, tests)
        train_data, test_data = self.garments.load()
        return Coloured(train_data, seed=0), Coloured(first(test_data, tests), seed=1)


def first(source: Any, count: int) -> Any:
    """The first examples."""
    few = source.gather(np.arange(min(count, len(source))))
    return eqxshard.data.ArraySource(
        few, name=source.name, unit=source.unit, warning=source.warning
    )


def read_cifar(folder: str, names: list[str]) -> Any:
    """Records of a label and 32x32 bytes of red, then of green, then of blue."""
    files = [Path(folder) / name for name in names]
    for file in files:
        if not file.exists():
            raise eqxshard.UsageError(
                f"{file} does not exist; give the folder of CIFAR-10."
            )
    records = np.concatenate([np.fromfile(file, np.uint8) for file in files])
    if records.size % 3073:
        raise eqxshard.UsageError(
            f"{folder} has files that are cut off; download CIFAR-10 again."
        )
    records = records.reshape(-1, 3073)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    arrays = {
        "image": np.ascontiguousarray(images),
        "label": records[:, 0].astype(np.int32),
    }
    return eqxshard.data.ArraySource(arrays, name="CIFAR-10", unit="images")
