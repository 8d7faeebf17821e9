"""Batches per second of augmented images, decoded from a folder of JPEG files.

Images are 256 x 256 in three colours. Each is decoded by Pillow, cropped to 224 x 224 at a
random place, and mirrored with probability 1/2. The baseline does so in one thread, without
a library for data. The batches of eqxshard are on the device; the others' are on the host.
Starting a loader and its workers, which are processes, is not measured.

    python benchmarks/images.py --output build/benchmarks
"""

import importlib
import importlib.util
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from _loading import (
    Batches,
    Contestants,
    compare,
    prepare_for_workers,
    with_grain,
    with_torch,
)
from _side_by_side import Report, parser
from PIL import Image

import eqxshard

SIZE, CROP = 256, 224
#: By default, Grain would make 500 batches ahead, which are gigabytes.
GRAIN_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)
#: Batches that are not measured: more than any loader makes ahead.
WARMUP_BATCHES = 12


def write_images(folder: Path, count: int) -> None:
    """Coloured clothes on backgrounds of noise, which JPEG cannot store in a few bytes."""
    clothes = eqxshard.data.synthetic_fashion("train", size=count).arrays
    generator = np.random.default_rng(0)
    for number, (image, label) in enumerate(zip(clothes["image"], clothes["label"])):
        large = Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        colour = generator.uniform(0.3, 1, 3)
        noise = generator.normal(0, 12, (SIZE, SIZE, 3))
        pixels = np.clip(np.asarray(large)[:, :, None] * colour + noise, 0, 255)
        file = folder / str(label) / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(file, quality=90)


def decode(file: str) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def crop(image: np.ndarray, top: int, left: int, mirrored: bool) -> np.ndarray:
    return image[top : top + CROP, left : left + CROP][:, :: -1 if mirrored else 1]


def crop_with_grain(example: tuple, draw: np.random.Generator) -> dict:
    file, label = example
    top, left = draw.integers(0, SIZE - CROP + 1, 2)
    return {"image": crop(decode(file), top, left, draw.random() < 0.5), "label": label}


class TorchImages:
    """A map-style PyTorch dataset: one image per index."""

    def __init__(self, files: Sequence[tuple[str, int]]):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        file, label = self.files[index]
        # Python's generator, because PyTorch seeds it in each worker.
        top, left = (random.randint(0, SIZE - CROP) for _ in range(2))
        image = crop(decode(file), top, left, random.random() < 0.5)
        return np.ascontiguousarray(image), label


def stack_for_torch(examples: Sequence[tuple[np.ndarray, int]]) -> list[Any]:
    # PyTorch's own function takes longer, above all if cores are busy.
    torch = importlib.import_module("torch")
    images, labels = zip(*examples)
    return [torch.from_numpy(np.stack(images)), torch.tensor(labels)]


def by_hand(files: Sequence[tuple[str, int]], batch_size: int) -> Iterator[dict]:
    dataset = TorchImages(files)
    for epoch in itertools.count():
        order = np.random.RandomState([0, epoch]).permutation(len(files))
        for start in range(0, len(files) - batch_size, batch_size):
            examples = [dataset[row] for row in order[start : start + batch_size]]
            images, labels = zip(*examples)
            yield {"image": np.stack(images), "label": np.array(labels)}


def with_eqxshard(
    files: Sequence[tuple[str, int]], batch_size: int, workers: int = 0
) -> Batches:
    records = grain.MapDataset.source(files).seed(0).shuffle()
    loader = eqxshard.Loader(
        records.random_map(crop_with_grain).repeat(),
        batch_size=batch_size,
        mesh=eqxshard.make_mesh(devices=jax.devices()[:1]),
        read_options=GRAIN_OPTIONS,
        workers=workers,
    )
    return iter(loader)


def contestants(folder: Path, batch_size: int, workers: int) -> Contestants:
    paths = sorted(folder.glob("*/*.jpg"))
    files = [(str(path), int(path.parent.name)) for path in paths]

    def crop_all(records: grain.MapDataset) -> grain.MapDataset:
        return records.random_map(crop_with_grain)

    loaders: dict[str, Callable[..., Batches]] = {
        "eqxshard": partial(with_eqxshard, files, batch_size),
        "Grain": partial(
            with_grain, files, crop_all, batch_size=batch_size, options=GRAIN_OPTIONS
        ),
    }
    if importlib.util.find_spec("torch"):
        dataset = TorchImages(files)
        loaders["PyTorch"] = partial(
            with_torch, dataset, batch_size=batch_size, collate_fn=stack_for_torch
        )
    found: Contestants = {"Pillow and NumPy": partial(by_hand, files, batch_size)}
    for name, loader in loaders.items():
        for count in (0, workers):
            found[f"{name}, {count} worker(s)"] = partial(loader, workers=count)
    return found


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--images", type=int, default=2000)
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--seconds", type=float, default=2.0, help="length of each turn")
    options.add_argument(
        "--workers", type=int, default=2, help="worker processes of a loader"
    )
    args = options.parse_args()
    prepare_for_workers()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), args.images)
        contest = compare(
            f"JPEGs of {SIZE} x {SIZE}, cropped and mirrored",
            contestants(Path(folder), args.batch_size, args.workers),
            seconds=args.seconds,
            warmup=WARMUP_BATCHES,
            rounds=args.rounds,
        )
    setting = {
        "images": args.images,
        "batch_size": args.batch_size,
        "rounds": args.rounds,
    }
    Report("images", [contest], setting).show_and_write(args.output)


if __name__ == "__main__":
    main()
