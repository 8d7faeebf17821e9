"""The summary of a run, from its log."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

from ..loop._clock import goodput


def summarize(history: list[dict[str, Any]], examples: int, unit: str) -> dict[str, Any]:
    """Metrics and speed of a run.

    **Arguments:**

    - `history`: the lines of its log.
    - `examples`: the number of examples in an epoch.
    - `unit`: the name of the examples, such as `images`.

    **Returns:**

    For each evaluated metric its last value, and a list of all; the median seconds of an
    epoch, and the examples per second; the wall time by part, and the share of it in which
    training steps ran. Without any times of training, the pace and the speed are `None`.
    """
    summary: dict[str, Any] = {}
    times: dict[str, float] = {}
    for line in history:
        for key, value in line.items():
            kind, _, name = key.partition("/")
            if kind == "eval":
                summary[f"test_{name}"] = value
                summary.setdefault(f"test_{name}_by_epoch", []).append(value)
            if kind == "seconds":
                times[name] = times.get(name, 0.0) + value
    seconds: dict[int, float] = {}
    epochs: dict[int, float] = {}
    last = 0.0
    for line in history:
        number = math.ceil(line["epoch"])
        seconds[number] = seconds.get(number, 0.0) + line.get("train/seconds", 0.0)
        epochs[number] = epochs.get(number, 0.0) + line["epoch"] - last
        last = line["epoch"]
    paces = [seconds[n] / epochs[n] for n in seconds if epochs[n] and seconds[n]]
    pace = statistics.median(paces) if paces else None
    speed = None if pace is None else examples / pace
    if times:
        summary |= {"seconds": times, "goodput": goodput(times)}
    return summary | {"seconds_per_epoch": pace, f"{unit}_per_second": speed}


def flatten_settings(settings: Any) -> dict[str, Any]:
    """The fields of nested dataclasses, or the entries of a dict, side by side.

    Their values are as JSON has them; what it has no kind for, such as a path, is text.
    """
    if isinstance(settings, Mapping):
        entries = dict(settings)
    else:
        names = [field.name for field in dataclasses.fields(settings)]
        entries = {name: getattr(settings, name) for name in names}
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            flat |= flatten_settings(value)
        else:
            flat[str(name)] = _to_json(value)
    return flat


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
