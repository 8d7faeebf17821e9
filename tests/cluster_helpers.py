"""A short training run on a cluster, and one process that trains the same."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Long enough to be disturbed, with a checkpoint now and then.
STEPS, SAVE_EVERY, LOG_EVERY = 400, 100, 20
TRAINING = [
    *("--model=mlp", "--data=synthetic", "--batch-size=64", f"--log-every={LOG_EVERY}"),
    *(f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--evaluate-every={STEPS}"),
]
#: The environment of each of two processes: a device, and the Python of the tests.
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


def train_alone(folder: Path) -> dict[int, dict[str, float]]:
    """The reports of one process with two devices."""
    command = ["recipes/fashion_mnist.py", *TRAINING, f"--output={folder}"]
    settings = {**os.environ, **SETTINGS, "JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=settings, check=True)
    return reports(folder)


def reports(run: Path) -> dict[int, dict[str, float]]:
    """The loss and the metrics by step; for a step that ran again, the last ones."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("train/loss", "eval/loss", "eval/accuracy")
    return {line["step"]: {k: line[k] for k in names if k in line} for line in lines}


def assert_same(
    found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]
) -> None:
    """Equal up to the rounding of sums over devices."""
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-5)


def wait_for(what: str, ready: Callable[[], object], seconds: float = 300) -> None:
    """Raise unless something becomes true in time."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
