"""The names of logged values: `train/loss` is the loss in training."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: Values that describe the run, not the model.
SPEEDS = ("seconds", "examples_per_second", "goodput")


class Metric(NamedTuple):
    """A value with its name split: `kind` is `train`, `eval`, or empty."""

    kind: str
    name: str
    value: float


def metrics(values: Mapping[str, float]) -> Iterator[Metric]:
    """The values that describe the model, in order."""
    for key, value in values.items():
        kind, slash, name = key.partition("/")
        metric = Metric(kind, name, value) if slash else Metric("", key, value)
        if key != "epoch" and kind != "seconds" and metric.name not in SPEEDS:
            yield metric


def times(values: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each part of the run since the last values."""
    named = (key.partition("/") for key in values)
    return {name: values[f"seconds/{name}"] for kind, _, name in named if kind == "seconds"}


def is_evaluation(values: Mapping[str, float]) -> bool:
    """Whether these are the values of an evaluation."""
    return any(metric.kind == "eval" for metric in metrics(values))
