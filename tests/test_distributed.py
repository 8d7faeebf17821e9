"""Runs of several processes over loopback: their results, and how they end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from cluster_run import make_model
from grades import graded
from helpers import arrays, lenient
from numpy_batches import batches_on, losses_of
from process_helpers import finished, read_until, started, workers_of

import eqxshard
from eqxshard.launch import _free_port

SCRIPT = Path(__file__).parent / "cluster_run.py"
SETTINGS = {**os.environ, "JAX_PLATFORMS": "cpu"}


def start(folder, *options, processes, devices, launch=(), **settings):
    """A launcher of several processes; stderr is in its stdout."""
    command = [
        *(sys.executable, "-m", "eqxshard.launch", f"--processes={processes}"),
        *(f"--devices-per-process={devices}", *launch, SCRIPT, folder, *options),
    ]
    return started(command, env=SETTINGS | settings, stderr=subprocess.STDOUT)


def run(folder, *options, **how):
    """The status of a launcher, and everything that was printed."""
    folder.mkdir(exist_ok=True)
    with start(folder, *options, **how) as process:
        out, _ = process.communicate(timeout=240)
    return process.returncode, out


def run_by_hand(starts):
    """Run without the launcher; the status and the stderr of each process."""
    address = [f"--address=127.0.0.1:{_free_port()}", f"--processes={len(starts)}"]
    with contextlib.ExitStack() as stack:
        processes = []
        for number, (command, settings) in enumerate(starts):
            words = [sys.executable, *command, *address, f"--process={number}"]
            processes.append(stack.enter_context(started(words, env=SETTINGS | settings)))
        for process in processes:
            _, err = process.communicate(timeout=300)
            yield process.returncode, err


def lines_of(folder):
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    times = re.compile("seconds|per_second|goodput")
    return [{k: v for k, v in line.items() if not times.search(k)} for line in lines]


def arrays_of(folder, step=15):
    """The arrays of a checkpoint by path, as one process reads them."""
    mesh = eqxshard.make_mesh(devices=jax.devices()[:1])
    like = eqxshard.abstract_state(
        make_model,
        lenient(optax.adam(1e-2)),
        key=jax.random.key(0),
        mesh=mesh,
        rule=eqxshard.replicate(),
    )
    checkpointer = eqxshard.Checkpointer(folder / "checkpoints")
    return arrays(checkpointer.restore(like, step=step))


def assert_same(folder, other, rtol=0.0):
    ours, theirs = lines_of(folder), lines_of(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, expected in zip(ours, theirs):
        assert line.keys() == expected.keys()
        for name, value in line.items():
            exact = rtol == 0 or "index" in name or "ones" in name
            assert value == pytest.approx(expected[name], rel=0 if exact else rtol, abs=0)
    ours, theirs = arrays_of(folder), arrays_of(other)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_allclose(array, theirs[path], rtol, rtol, err_msg=path)


def wait_for_step(folder, step):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"the run does not reach step {step}")


@pytest.mark.versions
@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path):
    status, out = run(tmp_path / "run", processes=2, devices=1)
    assert status == 0, out
    usual = ("[0] compiling the train step ...", "[0] goodput ")
    printed = [line for line in out.splitlines() if not line.startswith(usual)]
    assert len(printed) == len(out.splitlines()) - len(usual)
    assert sorted(printed) == [
        *("[0] finished at step 15", "[0] resuming from step 0 in 2 processes"),
        *("[1] finished at step 15", "[1] resuming from step 0 in 2 processes"),
    ]
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert lines[-1]["eval/ones"] == 1.0 and lines[-1]["eval/index"] == 49.5
    assert eqxshard.Checkpointer(tmp_path / "run" / "checkpoints").steps() == [5, 10, 15]


#: The options, and the numbers of processes; only fsdp is in one process of two, and in
#: several of four.
STRATEGIES = {
    "data": (("--mesh=data=8", "--rule=data"), (1, 4)),
    "fsdp": (("--mesh=data=2,fsdp=4", "--rule=fsdp"), (1, 2, 4)),
    "tensor": (("--mesh=data=4,tensor=2", "--rule=tensor"), (1, 4)),
}


@pytest.mark.parametrize("strategy", graded(STRATEGIES, slow=["fsdp"]))
def test_the_number_of_processes_does_not_change_the_results(tmp_path, strategy):
    options, (one, *several) = STRATEGIES[strategy]
    for processes in (one, *several):
        how = {"processes": processes, "devices": 8 // processes}
        status, out = run(tmp_path / str(processes), *options, **how)
        assert status == 0, out
    for processes in several:
        assert_same(tmp_path / str(processes), tmp_path / str(one), rtol=2e-6)


@pytest.mark.slow
def test_each_process_gives_the_whole_of_a_numpy_batch(tmp_path):
    launch = ["-m", "eqxshard.launch", "--processes=2", "--devices-per-process=2"]
    command = [
        sys.executable,
        *launch,
        Path(__file__).parent / "numpy_batches.py",
        tmp_path,
    ]
    status, out, err = finished(command, env=SETTINGS)
    assert status == 0, out + err
    mesh = eqxshard.make_mesh(fsdp=4, devices=jax.devices()[:4])
    expected = losses_of(batches_on(mesh), mesh)
    for number in range(2):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        np.testing.assert_allclose(found["losses"], expected, rtol=1e-5)
        says = "batch entry x is not the same array in all processes; give each"
        assert found["refused"].startswith(says)


@pytest.mark.slow
def test_a_check_that_fails_in_one_process_is_an_error_in_all(tmp_path):
    launch = ["-m", "eqxshard.launch", "--processes=2", "--devices-per-process=1"]
    script = Path(__file__).parent / "check_in_one_process.py"
    status, out, err = finished([sys.executable, *launch, script, tmp_path], env=SETTINGS)
    assert status == 0, out + err
    errors = [
        "UsageError: a check by equinox.error_if failed in process 1; read its output"
    ]
    errors += ["EquinoxRuntimeError"]
    for number, error in enumerate(errors):
        first, second, third = json.loads((tmp_path / f"{number}.json").read_text())
        assert (first, third) == ("right", "right") and second.startswith(error), second


@pytest.mark.slow
def test_explicit_axes_do_not_change_the_results(tmp_path):
    options = "--mesh=data=2,fsdp=2", "--rule=fsdp"
    for name, kind in (("auto", ()), ("explicit", ("--explicit",))):
        status, out = run(tmp_path / name, *options, *kind, processes=2, devices=2)
        assert status == 0, out
    assert_same(tmp_path / "explicit", tmp_path / "auto", rtol=2e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two processes without disturbance."""
    folder = tmp_path_factory.mktemp("whole")
    status, out = run(folder, processes=2, devices=1)
    assert status == 0, out
    return folder


@pytest.mark.slow
def test_when_one_is_killed_the_others_end_soon(tmp_path):
    options = ("--seconds-per-step=0.2", "--steps=500", "--batch-size=15")
    with start(tmp_path, *options, processes=3, devices=1) as process:
        wait_for_step(tmp_path, 3)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        began = time.monotonic()
        out, _ = process.communicate(timeout=300)
        assert time.monotonic() - began < 60
    assert process.returncode == 137
    assert "process 0 of 3 was killed by SIGKILL; the others were stopped" in out


@pytest.mark.slow
def test_a_restarted_run_ends_as_the_whole_one(tmp_path, whole):
    how = {"processes": 2, "devices": 1, "launch": ["--restarts=2"]}
    with start(tmp_path, "--seconds-per-step=0.5", **how) as process:
        wait_for_step(tmp_path, 8)
        os.kill(workers_of(process)[-1], signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "starting again with 2 processes" in out
    assert re.search(r"resuming from step (5|10) in 2 processes", out)
    assert_same(tmp_path, whole)


@pytest.mark.slow
def test_a_notice_to_one_process_saves_all_at_the_same_step(tmp_path, whole):
    with start(tmp_path, "--seconds-per-step=0.5", processes=2, devices=1) as process:
        wait_for_step(tmp_path, 7)
        os.kill(workers_of(process)[1], signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 143, out
    step = eqxshard.Checkpointer(tmp_path / "checkpoints").steps()[-1]
    assert 7 < step < 15
    assert f"the checkpoint of step {step} is saved." in out
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, step + 1))
    status, out = run(tmp_path, processes=2, devices=1)
    assert status == 0 and f"resuming from step {step} " in out
    assert_same(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, says",
    [
        ("seed", r"differ in state key: \[0, 0\] in process 0; \[0, 1\] in process 1"),
        ("batch_size", r"differ in loader batch_size: 16 in process 0; 32 in process 1"),
    ],
)
def test_processes_that_differ_do_not_start(tmp_path, what, says):
    status, out = run(tmp_path, processes=2, devices=1, DIFFER=what)
    assert status != 0
    assert re.search(says, out), out


@pytest.mark.slow
def test_processes_of_other_code_do_not_start(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.read_text() + "# another line\n")
    one = {"JAX_NUM_CPU_DEVICES": "1"}
    for status, err in run_by_hand([((x, tmp_path), one) for x in (SCRIPT, other)]):
        assert status == 1
        assert "processes of this run differ in process script's code: " in err


@pytest.mark.thorough
def test_hosts_are_the_outer_part_of_an_axis(tmp_path):
    options = ["--mesh=data=2,fsdp=2", "--rule=fsdp"]
    how = {"processes": 2, "devices": 2}
    status, out = run(tmp_path / "plain", *options, **how)
    assert status == 0, out
    status, out = run(tmp_path / "hybrid", *options, '--dcn={"data": 2}', **how)
    assert status == 0, out
    assert_same(tmp_path / "hybrid", tmp_path / "plain", rtol=2e-6)


@pytest.mark.parametrize("what", graded(["exception", "checkpointer"], slow=["exception"]))
def test_an_exception_in_one_process_ends_all(tmp_path, what):
    with start(tmp_path, processes=2, devices=1, DIFFER=what) as process:
        lines = read_until(process, process.stdout, "resuming from step 0")
        began = time.monotonic()
        rest, _ = process.communicate(timeout=240)
        assert time.monotonic() - began < 120
    out = "".join([*lines, rest])
    assert process.returncode == 1, out
    if what == "exception":
        assert "process 1 of 2 ended with status 1; the others were stopped" in out
    assert {
        "exception": "RuntimeError: a bad file",
        "checkpointer": "differ in fit saves: true in process 0; false in process 1",
    }[what] in out


# Joining


@pytest.fixture
def joining(monkeypatch):
    """Restore the hook that joining other processes replaces."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.parametrize("address", ["node-1", "node-1:port"])
def test_an_address_without_host_or_port_is_a_mistake(joining, address):
    with pytest.raises(ValueError, match=f"{address!r} is not HOST:PORT; write one such"):
        eqxshard.initialize(address, 2, 1)


@pytest.mark.slow
def test_processes_that_wait_in_vain_for_another_end(tmp_path):
    """Two of three come; JAX ends them."""
    join = "import sys, eqxshard; eqxshard.initialize(sys.argv[1], 3, int(sys.argv[2]))"
    address = f"127.0.0.1:{_free_port()}"
    settings = SETTINGS | {"EQXSHARD_WAIT_SECONDS": "8"}
    with contextlib.ExitStack() as stack:
        commands = [[sys.executable, "-c", join, address, str(n)] for n in range(2)]
        several = [stack.enter_context(started(each, env=settings)) for each in commands]
        for process in several:
            _, err = process.communicate(timeout=240)
            assert process.returncode == -signal.SIGABRT, err
            assert "DEADLINE_EXCEEDED" in err
