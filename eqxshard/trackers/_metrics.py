"""Sorts logged values by their names: metrics such as `train/loss`, speeds and times.

The protocol of trackers is the loop's: `loop/_tracker.py`.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..loop._tracker import Image as Image
from ..loop._tracker import Tracker as Tracker
from ..loop._tracker import Value as Value
from ..loop._tracker import numbers as numbers

#: Values that describe the run, not the model.
SPEEDS = ("seconds", "examples_per_second", "goodput")


class Metric(NamedTuple):
    """A value with its name split: `kind` is `train`, `eval`, or empty."""

    kind: str
    name: str
    value: float


def metrics(values: Mapping[str, Value]) -> Iterator[Metric]:
    """The numbers that describe the model, in order."""
    for key, value in numbers(values).items():
        kind, slash, name = key.partition("/")
        metric = Metric(kind, name, value) if slash else Metric("", key, value)
        if key != "epoch" and kind != "seconds" and metric.name not in SPEEDS:
            yield metric


def times(values: Mapping[str, Value]) -> dict[str, float]:
    """The seconds of each part of the run since the last values."""
    named = ((*key.partition("/"), value) for key, value in numbers(values).items())
    return {name: value for kind, _, name, value in named if kind == "seconds"}


def is_evaluation(values: Mapping[str, Value]) -> bool:
    """True if some of the values are from an evaluation."""
    return any(metric.kind == "eval" for metric in metrics(values))


def is_installed(package: str) -> bool:
    """True if a package is installed.

    A folder of the same name, such as the `wandb` that W&B writes beside a script, does
    not count, although Python would import it as an empty namespace package.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.has_location
