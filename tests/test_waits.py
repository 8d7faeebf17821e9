"""A process that others wait for in vain: who is named, and how all end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from grades import graded
from process_helpers import started

SCRIPT = Path(__file__).parent / "waits_run.py"
LIMIT = 4

#: Where the last process is late, and what the others wait for.
PLACES = {
    "barrier": "the files",
    "loader": "the loader of all processes",
    "state": "the state of all processes",
    "save": "a value of all processes",
}


def run(folder, where, how, *, processes=2, restarts=0):
    """The status of the launcher, and what was printed."""
    command = [
        *(sys.executable, "-m", "eqxshard.launch", f"--processes={processes}"),
        *("--devices-per-process=1", f"--restarts={restarts}", SCRIPT, where, how, folder),
    ]
    settings = {"JAX_PLATFORMS": "cpu", "EQXSHARD_WAIT_SECONDS": str(LIMIT)}
    environment = {**os.environ, **settings}
    with started(command, env=environment, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=300)
    return process.returncode, out


@pytest.mark.parametrize("where", graded([*PLACES], slow=["barrier", "save"]))
def test_a_process_that_does_not_come_is_named(tmp_path, where):
    status, out = run(tmp_path, where, "sleeps", processes=3)
    assert status == 1, out
    # JAX counts and names them; we say what for.
    assert "] # of tasks that reached the barrier: 2/3.\n" in out, out
    assert re.search(r"Some timed out task names:\n\[\d\] 2\n", out), out
    says = f" waited for {PLACES[where]}, for up to wait_seconds={LIMIT}. "
    assert re.search(r"\] Process \d" + re.escape(says), out), out


@pytest.mark.slow
def test_the_launcher_starts_again_after_a_process_was_frozen(tmp_path):
    status, out = run(tmp_path, "barrier", "stops", restarts=1)
    assert status == 0, out
    assert "starting again with 2 processes" in out and "[1] finished" in out


@pytest.mark.thorough
def test_a_process_at_another_place_is_told_at_once(tmp_path):
    status, out = run(tmp_path, "loader", "skips")
    assert status == 1, out
    for process in range(2):
        says = (
            rf"^\[{process}\] eqxshard\S*UsageError: the processes of this run wait for "
            r"different things: for the loader of all processes in process 0; for the "
            r"state of all processes in process 1\. Start"
        )
        assert re.search(says, out, re.MULTILINE), out
