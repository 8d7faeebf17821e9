"""Images per second that data loaders deliver, side by side in one run.

Batches of 256 from 60,000 images of 28 x 28 bytes in memory, shuffled: the size of
Fashion-MNIST, where what a loader costs shows. Bare NumPy, which is what it all comes
down to, is the measure. Contestants take turns, round by round, so that whatever else the
machine does meets them alike.

    python benchmarks/loader.py --devices 1 2 8 --json loader.json
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import eqxshard

IMAGES, BATCH_SIZE = 60_000, 256

Batches = Iterator[Any]


def with_numpy(images: np.ndarray) -> Batches:
    for epoch in itertools.count():
        order = np.random.RandomState([0, epoch]).permutation(len(images))
        for start in range(0, len(images) - BATCH_SIZE, BATCH_SIZE):
            yield images[order[start : start + BATCH_SIZE]]


def with_eqxshard(images: np.ndarray, devices: int, prefetch: int) -> Batches:
    mesh = eqxshard.make_mesh(devices=jax.devices()[:devices])
    source = eqxshard.data.ArraySource({"image": images})
    loader = eqxshard.Loader(source, batch_size=BATCH_SIZE, mesh=mesh, prefetch=prefetch)
    return iter(loader)


def with_grain(images: np.ndarray) -> Batches:
    records = grain.MapDataset.source(list(images)).seed(0).shuffle().repeat()
    return iter(records.batch(BATCH_SIZE).to_iter_dataset())


def with_torch(images: np.ndarray) -> Batches:
    data = importlib.import_module("torch.utils.data")
    tensor = importlib.import_module("torch").from_numpy(images)
    loader = data.DataLoader(
        data.TensorDataset(tensor), BATCH_SIZE, shuffle=True, drop_last=True
    )
    while True:
        yield from loader


def contestants(images: np.ndarray, devices: list[int]) -> dict[str, Callable[[], Batches]]:
    """What makes the batches, by name; NumPy first."""
    made: dict[str, Callable[[], Batches]] = {
        "NumPy, images at an array of rows, on the host": lambda: with_numpy(images)
    }
    for count, prefetch in itertools.product(devices, (2, 0)):
        name = f"eqxshard.Loader(prefetch={prefetch}), on {count} device(s)"
        made[name] = lambda c=count, p=prefetch: with_eqxshard(images, c, p)
    made["Grain, per record, on the host"] = lambda: with_grain(images)
    if importlib.util.find_spec("torch"):
        made["torch DataLoader, on the host"] = lambda: with_torch(images)
    return made


def images_per_second(make: Callable[[], Batches], seconds: float) -> float:
    threads = threading.active_count()
    batches: Any = make()
    batch = next(batches)  # the start is not measured
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        count += 1
    jax.block_until_ready(batch)
    elapsed = time.perf_counter() - start
    batches.close()
    while threading.active_count() > threads:  # or its threads would run in others' turns
        time.sleep(0.001)
    return count * BATCH_SIZE / elapsed


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("eqxshard", "jax", "grain", "numpy", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Images per second that data loaders deliver, side by side."
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(args.devices))
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, 28, 28), np.uint8)

    rates: dict[str, list[float]] = {}
    for _ in range(args.rounds + 1):
        for name, make in contestants(images, args.devices).items():
            rates.setdefault(name, []).append(images_per_second(make, args.seconds))
    rates = {
        name: figures[1:] for name, figures in rates.items()
    }  # the first is to warm up
    numpy = next(iter(rates.values()))

    rows = []
    for name, figures in rates.items():
        ratio = statistics.median(mine / bare for mine, bare in zip(figures, numpy))
        rows.append({"name": name, "images_per_second": figures, "of_numpy": ratio})
    table = Table("", "images/s", "min to max", "of NumPy")
    for row in rows:
        figures = row["images_per_second"]
        table.add_row(
            row["name"],
            f"{statistics.median(figures):,.0f}",
            f"{min(figures):,.0f} to {max(figures):,.0f}",
            f"{row['of_numpy']:.3f}",
        )
    setting = {
        "versions": versions(),
        "platform": jax.default_backend(),
        "cpus": os.cpu_count(),
        "batch_size": BATCH_SIZE,
        "rounds": args.rounds,
    }
    console = Console()
    console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    console.print(f"{setting['cpus']} CPUs, {args.rounds} rounds, {setting['platform']}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(setting | {"results": rows}, file, indent=2)


if __name__ == "__main__":
    main()
