"""For `data.py`: batches of images from memory, in one process or in several.

With the variant `hand`, by NumPy and JAX: each process gathers its own rows.
"""

import itertools
import os
from collections.abc import Iterator

import jax
import numpy as np
from _task import LOADER_STEPS, Contestant, Task

import eqxshard
from eqxshard.sharding import batch_sharding

IMAGES, SHAPE = 60_000, (28, 28)


def make(task: Task) -> Contestant:
    processes, process = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if processes > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        eqxshard.initialize(address, processes, process)
    mesh = eqxshard.make_mesh()
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, *SHAPE), np.uint8)
    loader = eqxshard.Loader(
        eqxshard.data.ArraySource({"image": images}),
        batch_size=task.batch_size,
        mesh=mesh,
    )

    def by_hand() -> Iterator[jax.Array]:
        sharding = batch_sharding(mesh)
        size = task.batch_size // processes
        for epoch in itertools.count():
            order = np.random.RandomState([0, epoch]).permutation(IMAGES)
            for start in range(0, IMAGES - task.batch_size, task.batch_size):
                first = start + process * size
                part = np.take(images, order[first : first + size], axis=0)
                yield jax.make_array_from_process_local_data(sharding, part)

    batches = by_hand() if task.variant == "hand" else iter(loader)

    def train() -> None:
        batch = None
        for _ in range(LOADER_STEPS):
            batch = next(batches)
        jax.block_until_ready(batch)

    def evaluate() -> tuple[float, float]:
        raise NotImplementedError("loader_steps only reads: use the command train.")

    return Contestant(train, evaluate)
