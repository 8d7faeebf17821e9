"""Runs that are killed and disturbed at random instants, and end as if they were not.

`python tests/kill_runs.py` kills more; `EQXSHARD_SOAK_MINUTES=30` makes the soak longer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SETTINGS = {**os.environ, "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_killed_runs_end_as_the_whole_one():
    # In a process of its own, which forks before it has touched a device.
    run = subprocess.run(
        [sys.executable, TESTS / "kill_runs.py", "--runs", "5", "--seed", "7"],
        env=SETTINGS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all ended as one" in run.stdout


@pytest.mark.thorough
def test_a_run_that_faults_disturb_ends_as_one_without():
    minutes = os.environ.get("EQXSHARD_SOAK_MINUTES", "2")
    # Its log of faults is shown as it comes with `pytest -s`, else if it fails.
    command = [sys.executable, TESTS / "soak.py", "--minutes", minutes]
    assert subprocess.run(command, env=SETTINGS, check=False).returncode == 0
