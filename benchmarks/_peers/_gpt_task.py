"""The task of the contestants of `gpt.py`: a model, its first weights, and batches."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.99), 0.1, 1.0


class Contestant(NamedTuple):
    """A function that takes the steps of a turn, and returns their mean `loss`."""

    train: Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Task:
    """The task of one contestant.

    - `shape`: the fields of the `Shape` of `recipes/gpt_model.py` as JSON.
    - `data`: the path of a `.npz` file of `tokens`, one stream, and `starts`, the first
      tokens of the sequences of each step.
    - `weights`: the path of a safetensors file of the initial weights, by their names in
      `recipes/gpt_model.py`; empty to draw them.
    - `steps`: the steps of one turn.
    - `total`: the steps of the whole run, for the schedule of the learning rate.
    - `batch_size`: the sequences of a step, over all devices.
    - `precision`: the dtype to compute in: `float32` or `bfloat16`.
    - `devices`: the number of devices to split the work over; for eqxshard only.
    - `axis`: the mesh axis to split it over, `fsdp` or `data`; for eqxshard only.
    - `remat`: the recipe's `--remat`; for eqxshard only.
    - `gpu`: whether to run on a GPU, and compile the PyTorch model.
    """

    shape: str
    data: str
    weights: str
    steps: int
    total: int
    batch_size: int
    precision: str = "float32"
    devices: int = 1
    axis: str = "fsdp"
    remat: str = "dots"
    gpu: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        """The shape, as a dict."""
        return json.loads(self.shape)

    def learning_rate(self, step: int) -> float:
        """As the recipe's optimizer: a linear rise, then a cosine to a tenth."""
        rise = min(max(self.total // 100, 1), self.total - 1)
        if step < rise:
            return LEARNING_RATE * step / rise
        part = min((step - rise) / (self.total - rise), 1.0)
        return LEARNING_RATE * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)


class Sequences:
    """The sequences of each step, and their targets, by number."""

    def __init__(self, task: Task):
        with np.load(task.data) as file:
            self.tokens, self.starts = file["tokens"], file["starts"]
        self.block = task.sizes["seq_len"]

    def __len__(self) -> int:
        return self.starts.size

    def gather(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences of some numbers, in a batch."""
        rows = self.starts.reshape(-1)[indices][:, None] + np.arange(self.block + 1)
        found = self.tokens[rows].astype(np.int32)
        return {"tokens": found[:, :-1], "targets": found[:, 1:]}
