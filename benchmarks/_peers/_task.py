"""The task that each contestant gets, the functions that it provides, and constants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEARNING_RATE, B2, WEIGHT_DECAY = 1e-3, 0.98, 0.01
#: The number of batches that `loader_steps.py` reads per command.
LOADER_STEPS = 1000
MEAN, DEVIATION = 0.2860, 0.3530  # of the pixels
#: Channels of both convolutions, kernel size of the second, width of the hidden layer.
SIZES = {"lenet": (20, 50, 5, 128), "cnn": (32, 64, 3, 256)}


def features(conv2: int, kernel2: int) -> int:
    """The size of the second pool's output; the first leaves 13 x 13 of 28 x 28 pixels."""
    return conv2 * ((13 - kernel2 + 1) // 2) ** 2


class Contestant(NamedTuple):
    """Functions that train for an epoch, and that return test accuracy and test loss."""

    train: Callable[[], None]
    evaluate: Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Task:
    """The task of one contestant.

    - `model`: a key of `SIZES`.
    - `data`: the path of a `.npz` file of images (uint8) and labels (int32).
    - `devices`: the number of devices, or processes, that a batch is split over.
    - `variant`: a variant of the module, such as `device` of `with_eqxshard`.
    - `batch_size`: the rows of a batch, over all devices.
    - `gpu`: whether to run on a GPU.
    """

    model: str
    data: str
    devices: int = 1
    variant: str = ""
    batch_size: int = 256
    gpu: bool = False

    def load(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self.data) as file:
            return file[f"{split}_image"], file[f"{split}_label"]


def batches(image: np.ndarray, label: np.ndarray, size: int, order: np.ndarray):
    """NumPy batches in a given order; the last one may be smaller."""
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield image[rows], label[rows]
