"""Random numbers for each example, the same wherever and whenever it is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int


@dataclass(frozen=True)
class RandomTransform:
    """A transform that draws random numbers, for the `transform` of [`eqxshard.Loader`][].

    An example's draws are a function of the loader's seed, the epoch and the example's row
    in the source. So they are the same on any number of processes and workers, for any
    batch size, and in a run that was resumed. (If a sampler repeats a row in an epoch,
    each repetition draws anew.)

    The generators are NumPy's, and take about 15 microseconds each to make. Augment small
    images on the devices instead, in the loss function, with its `key`. (NumPy may change
    what a generator draws in a later version.)

    **Arguments:**

    - `fn`: called with a dict of NumPy arrays, as any transform, and with a list of one
        `numpy.random.Generator` for each of their rows; returns a dict of arrays.

    !!! Example

        ```python
        def flip(batch, generators):
            flips = [generator.random() < 0.5 for generator in generators]
            pairs = zip(batch["image"], flips)
            images = [image[:, ::-1] if flip else image for image, flip in pairs]
            return {**batch, "image": np.stack(images)}


        loader = eqxshard.Loader(
            source,
            batch_size=256,
            mesh=mesh,
            transform=eqxshard.data.RandomTransform(flip),
        )
        ```
    """

    fn: Callable[[dict[str, Any], list[np.random.Generator]], dict[str, Any]]


def example_generators(
    seed: int,
    epoch: int,
    rows: Int[np.ndarray, " rows"],
    repeats: Int[np.ndarray, " rows"],
) -> list[np.random.Generator]:
    """Generators for some rows in an epoch, where each came `repeats` times before."""
    pairs = zip(rows.tolist(), repeats.tolist())
    return [np.random.default_rng([seed, epoch, *pair]) for pair in pairs]
