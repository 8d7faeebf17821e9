"""A process that others wait for in vain: who is named, where it is, and how all end."""

import os
import re
import subprocess
import sys
import time
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
    "step": r"(the devices|the metrics .*|step \d|the steps before step \d)",
    "evaluation": "(the devices|an evaluation)",
    "evaluate": "(the devices|an evaluation)",
    "save": "the checkpoint to save",
    "restore": "the checkpoint to restore",
    "end": "the end of the script",
}


def run(folder, where, how, *, processes=2, restarts=0):
    """The status of the launcher, what was printed, and the seconds that it took."""
    command = [
        *(sys.executable, "-m", "eqxshard.launch", f"--processes={processes}"),
        *("--devices-per-process=1", f"--restarts={restarts}", SCRIPT, where, how, folder),
    ]
    settings = {"JAX_PLATFORMS": "cpu", "EQXSHARD_WAIT_SECONDS": str(LIMIT)}
    environment = {**os.environ, **settings}
    began = time.monotonic()
    with started(command, env=environment, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=300)
    return process.returncode, out, time.monotonic() - began


@pytest.mark.parametrize("where", graded([*PLACES], slow=[]))
def test_a_process_that_does_not_come_is_named_with_its_stack(tmp_path, where):
    status, out, _ = run(tmp_path, where, "sleeps", processes=3)
    assert status == 1, out
    # The process that noticed says so to all.
    says = rf"has waited \d+ s for {PLACES[where]}, longer than wait_seconds={LIMIT}\."
    for process in range(3):
        mine = re.findall(rf"^\[{process}\] (.*)$", out, re.MULTILINE)
        assert any(re.search(says, line) for line in mine), out
        assert any(re.match(r"process 2 on \S+ has not come; ", line) for line in mine), out
        # Its own line, where it is.
        assert "    time.sleep(3600)" in mine and '    arrives("' in "\n".join(mine), out


@pytest.mark.slow
def test_the_launcher_starts_again_after_a_process_was_frozen(tmp_path):
    status, out, _ = run(tmp_path, "step", "stops", restarts=1)
    assert status == 0, out
    said = "[0] process 1 on "
    (line,) = [line for line in out.splitlines() if line.startswith(said)]
    assert line.endswith("does not answer: it, or its host, is frozen or gone.")
    assert "starting again with 2 processes" in out and "[1] finished" in out


@pytest.mark.thorough
def test_a_process_that_has_left_is_told_at_once(tmp_path):
    status, out, _ = run(tmp_path, "loader", "leaves")
    assert status == 1, out
    for process in range(2):
        says = (
            rf"^\[{process}\] ValueError: the processes of this run wait for different "
            r"things: for the loader of all processes in process 0; for the end of the "
            r"script in process 1\. Start"
        )
        assert re.search(says, out, re.MULTILINE), out


@pytest.mark.thorough
def test_what_all_do_may_take_any_time(tmp_path):
    status, out, _ = run(tmp_path, "nowhere", "all take long")
    assert status == 0, out
    assert "wait_seconds" not in out
