import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from eqxshard.run._summary import flatten_settings, summarize


def test_evaluations_are_listed_and_the_last_one_is_named():
    history: list[dict[str, Any]] = [
        {"epoch": 0.5, "train/loss": 3.0, "train/seconds": 1.0},
        {"epoch": 1.0, "train/loss": 2.0, "train/seconds": 1.0, "eval/accuracy": 0.25},
        {"epoch": 2.0, "train/loss": 1.0, "train/seconds": 4.0, "eval/accuracy": 0.5},
        {"epoch": 3.0, "train/loss": 1.0, "train/seconds": 3.0, "eval/accuracy": 0.75},
    ]
    assert summarize(history, 600, "images") == {
        "test_accuracy": 0.75,
        "test_accuracy_by_epoch": [0.25, 0.5, 0.75],
        "seconds_per_epoch": 3.0,  # the median of 2, 4 and 3
        "images_per_second": 200.0,
    }


def test_the_wall_time_is_that_of_all_lines():
    history: list[dict[str, Any]] = [
        {"epoch": 0.5, "seconds/device": 2.0, "seconds/dispatch": 1.0, "seconds/log": 1.0},
        {"epoch": 1.0, "seconds/device": 1.0, "seconds/dispatch": 0.0, "seconds/log": 3.0},
    ]
    found = summarize(history, 100, "examples")
    assert found["seconds"] == {"device": 3.0, "dispatch": 1.0, "log": 4.0}
    assert found["goodput"] == 0.5


@pytest.mark.parametrize("history", [[], [{"epoch": 1.0, "eval/loss": 2.0}]])
def test_a_run_without_times_has_no_speed(history):
    found = summarize(history, 100, "examples")
    assert found["seconds_per_epoch"] is found["examples_per_second"] is None


@dataclasses.dataclass
class Inner:
    seed: int = 3


def test_settings_are_what_json_has():
    settings = {
        "path": Path("/data"),
        "sizes": (1, (2.5, Path("x"))),
        "inner": [{3: {4}}],
        "limits": [math.inf, -math.inf, math.nan],
        "none": None,
        "flag": True,
        7: "number",
        "run": {"deep": Inner()},
    }
    flat = flatten_settings(settings)
    assert flat == {
        "path": "/data",
        "sizes": [1, [2.5, "x"]],
        "inner": [{"3": "{4}"}],
        "limits": ["inf", "-inf", "nan"],
        "none": None,
        "flag": True,
        "7": "number",
        "seed": 3,
    }
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat
