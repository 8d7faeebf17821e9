"""The names of logged values: `train/loss` is the loss in training."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..loop._media import Value, numbers

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
    """Whether these are the values of an evaluation."""
    return any(metric.kind == "eval" for metric in metrics(values))
