"""What all contestants of `epoch.py` are given, and what is asked of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LEARNING_RATE, B2, WEIGHT_DECAY = 1e-3, 0.98, 0.01
#: That `mlp_steps.py` takes at once.
MLP_STEPS = 20
MEAN, DEVIATION = 0.2860, 0.3530  # of the pixels
#: Channels of the two convolutions, side of the second's kernel, width of the hidden layer.
SIZES = {"lenet": (20, 50, 5, 128), "cnn": (32, 64, 3, 256)}


def features(conv2: int, kernel2: int) -> int:
    """How many numbers the second pool hands on: of 28 pixels, 13 are left by the first."""
    return conv2 * ((13 - kernel2 + 1) // 2) ** 2


class Contestant(NamedTuple):
    """An epoch of training, and the accuracy and the loss on the test images after it."""

    train: Callable[[], None]
    evaluate: Callable[[], tuple[float, float]]


@dataclass(frozen=True)
class Task:
    """One contestant's task.

    - `model`: a name in `SIZES`.
    - `data`: the file of the images and labels, as bytes and int32.
    - `devices`: over how many devices, or processes, batches are split.
    - `variant`: which of a module's contestants it is.
    - `batch_size`: of a step, over all devices.
    - `gpu`: whether there is one to use.
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
    """Plain NumPy: batches in an order, of which the last is smaller."""
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        yield image[rows], label[rows]
