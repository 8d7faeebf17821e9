"""Runs of two processes that are disturbed, and end as one that is not."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from process_helpers import finished, read_until, workers_of
from test_distributed import assert_same, run, start, wait_for_step
from test_distributed import whole as whole

import eqxshard

pytestmark = pytest.mark.slow


def test_a_notice_during_an_evaluation(tmp_path, whole):
    with start(tmp_path, "--linger=3", processes=2, devices=1) as process:
        read_until(process, process.stdout, "in the evaluation")
        os.kill(workers_of(process)[1], signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 143, out
    (step,) = set(re.findall(r"the checkpoint of step (\d+) is saved\.", out))
    assert eqxshard.Checkpointer(tmp_path / "checkpoints").steps()[-1] == int(step) < 15
    status, out = run(tmp_path, processes=2, devices=1)
    assert status == 0 and f"resuming from step {step} " in out
    assert_same(tmp_path, whole)


def test_a_disk_that_is_full_on_one_host_is_told_soon(tmp_path, whole):
    # Split over the processes, so that each has something to write.
    split = ("--mesh=data=1,fsdp=2", "--rule=fsdp")
    options = (*split, "--full-process=1", "--seconds-per-step=0.3")
    with start(tmp_path, *options, processes=2, devices=1) as process:
        lines = read_until(process, process.stdout, "resuming from step 0")
        wait_for_step(tmp_path, 9)
        began = time.monotonic()
        says = "the checkpoint of step 10 could not be written"
        lines += read_until(process, process.stdout, says)
        assert time.monotonic() - began < 120
        assert "process 1: " in lines[-1]
        assert "step 5. Training continues." in lines[-1]
        # The other process does not wait for it at the end either.
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert eqxshard.Checkpointer(tmp_path / "checkpoints").steps() == [5, 15]
    assert_same(tmp_path, whole, rtol=2e-6)


def test_damage_that_one_process_sees_is_damage_for_all(tmp_path):
    script = Path(__file__).parent / "damaged_run.py"
    command = [sys.executable, "-m", "eqxshard.launch", "--processes=2", script, tmp_path]
    status, out, err = finished(command, env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"})
    assert status == 0, out + err
    for process in (0, 1):
        says = f"[{process}] restored step 0, whose numbers begin with 0\n"
        assert says in out, out + err
    assert re.search(r"step 1 in .* is damaged \(process 1: model\.x in .* mismatch", out)


def test_a_run_with_a_process_that_hangs_is_ended_and_starts_again(tmp_path, whole):
    options = ("--stall-process=1", "--hang-seconds=15")
    how = {"processes": 2, "devices": 1, "launch": ["--restarts=1"]}
    status, out = run(tmp_path, *options, **how)
    assert status == 0, out
    says = (
        r"process 1 of 2: no progress for \d+ s, longer than hang_seconds=15: waiting for "
        r"the batch of step 8; the stacks of all threads are above"
    )
    assert re.search(says, out), out
    assert "resuming from step 5 in 2 processes" in out
    assert_same(tmp_path, whole)


def test_a_save_that_one_process_fails_is_ended_in_the_other_and_can_be_repeated(tmp_path):
    """Nothing is written any more when what was written is removed."""
    script = Path(__file__).parent / "given_up_run.py"
    command = [sys.executable, "-m", "eqxshard.launch", "--processes=2", script]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    status, out, err = finished([*command, tmp_path / "run"], env=env)
    assert status == 0, out + err
    for process in (0, 1):
        says = rf"\[{process}\] failed: the checkpoint of step 0 could not be written .*: "
        assert re.search(says + "process 1: ", out), out + err
        assert f"[{process}] restored: {{2.0}}" in out, out + err
    assert "[0] stopped early: True" in out
    assert "[0] left: ['eqxshard.txt', 'lock']" in out
    assert "[0] parts: 2 of 1 save" in out
