"""The log of a run: the reports in its `metrics.jsonl`."""

import json
from collections.abc import Sequence
from typing import Any

from ..trackers._jsonl import read_whole_lines
from ._paths import RunPaths


def read_log(paths: RunPaths, waiting: Sequence[str]) -> list[dict[str, Any]]:
    """The reports in `metrics.jsonl`, and then those in lines that wait for room."""
    lines = [line for _, line in read_whole_lines(paths.metrics)]
    lines += [json.loads(text) for text in waiting]
    # Users may have written other lines between them.
    return [line for line in lines if isinstance(line.get("step"), int)]
