"""Runs that are killed at random instants; `python tests/kill_runs.py` kills more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_killed_runs_end_as_the_whole_one():
    # In a process of its own, which forks before it has touched a device.
    script = Path(__file__).parent / "kill_runs.py"
    run = subprocess.run(
        [sys.executable, script, "--runs", "5", "--seed", "7"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all ended as one" in run.stdout
