"""The best checkpoint of a folder, by a metric."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from ..distributed import broadcast_from_first
from ._description import Description
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
        return _best_of(self._scores(self._folder.known_steps())[0])

    def choose(self, step: int | Literal["newest"] | None) -> Description:
        """Verify the checkpoint to read, and describe it; `None` is what `step` has found.

        Raises `ValueError` if that is `None`: the newest would not be the best.
        """
        if step is None:
            raise ValueError(
                f"step=None is not a step: no checkpoint in {self._folder.path} has a "
                f"value of best={self.metric!r}; give best= the name of a metric that was "
                "saved, or leave step out to read the newest."
            )
        return self._folder.choose(None if step == "newest" else step)

    def candidates(self, steps: Iterable[int]) -> set[int]:
        """The best of some steps, and those that may be better but cannot be read now."""
        scores, unread = self._scores(steps)
        best = _best_of(scores)
        return unread if best is None else {best, *unread}

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
        scores, _ = self._scores(self._folder.known_steps())
        best = max(scores.values(), default=-math.inf)
        better = math.isfinite(value) and self._sign * value > best
        # Processes may see a shared folder at different times.
        return broadcast_from_first(better)

    def _scores(self, steps: Iterable[int]) -> tuple[dict[int, float], set[int]]:
        """By step, the scores of those that have one; and the steps that cannot be read."""
        scores: dict[int, float] = {}
        unread: set[int] = set()
        if self.metric is None:
            return scores, unread
        for step in steps:
            try:
                value = self._folder.metric(step, self.metric)
            # Not only OSError: packages for object stores have errors of their own.
            except Exception:
                unread.add(step)
                continue
            if value is not None:
                scores[step] = self._sign * value
        return scores, unread


def _best_of(scores: Mapping[int, float]) -> int | None:
    return max(scores, key=lambda step: (scores[step], step), default=None)
