"""The best checkpoint of a folder, by a metric."""

import math
from collections.abc import Mapping
from typing import Literal

from ..distributed import broadcast_from_first
from ._folder import CheckpointFolder


class Best:
    """Compares the checkpoints of a folder by a metric.

    **Arguments:**

    - `folder`: the folder.
    - `metric`: the name of the metric; with `None`, no checkpoint is best.
    - `mode`: whether the best value is the largest or the smallest.
    """

    def __init__(
        self, folder: CheckpointFolder, metric: str | None, mode: Literal["max", "min"]
    ):
        self._folder = folder
        self.metric = metric
        self._sign = 1 if mode == "max" else -1

    def step(self) -> int | None:
        """The step of the best checkpoint; of equals, the latest."""
        scores = self._scores()
        return max(scores, key=lambda step: (scores[step], step), default=None)

    def is_beaten_by(self, metrics: Mapping[str, float]) -> bool:
        """Whether metrics are better than those of every checkpoint.

        Raises `ValueError` if they are of an evaluation, and the one that decides is not
        among them.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics and any(name.startswith("eval/") for name in metrics):
            raise ValueError(
                f"best={self.metric!r} is not a metric of this run; use one of "
                f"{', '.join(metrics)}."
            )
        value = metrics.get(self.metric, math.nan)
        best = max(self._scores().values(), default=-math.inf)
        better = math.isfinite(value) and self._sign * value > best
        # Processes may see a shared folder at different times.
        return broadcast_from_first(better)

    def _scores(self) -> dict[int, float]:
        values = {} if self.metric is None else self._folder.metric(self.metric)
        return {step: self._sign * value for step, value in values.items()}
