"""The recipe for Fashion-MNIST: its options, its data, and that every model learns.

What it does by `eqxshard.train` and `eqxshard.cli` is tested in tests/run.
"""

import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from grades import graded
from helpers import REAL, needs_real_data
from process_helpers import finished, started, workers_of
from run_helpers import (
    PNG,
    ROOT,
    assert_refused,
    call,
    environment,
    measured,
    read_lines,
)

import eqxshard

SCRIPT = ROOT / "recipes" / "fashion_mnist.py"
IMAGES = "train-images-idx3-ubyte.gz"
#: Nothing listens there, so that nothing is downloaded.
NO_MIRROR = "http://127.0.0.1:9/"
LAST_LINE = re.compile(
    r"test accuracy 0\.\d{4} \| \d+\.\d s/epoch \| \d{1,3}(,\d{3})* images/s"
    r" \| MLP on \d+ x cpu \(data=\d+\)( \| synthetic data)?"
)
synthetic_fashion = eqxshard.data.synthetic_fashion


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Keep tests away from the user's own data and folders, and from the internet."""
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("EQXSHARD_FASHION_MNIST_URL", NO_MIRROR)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs the recipe in this process; returns its status, stdout and stderr."""
    return partial(call, capsys, monkeypatch, SCRIPT)


@pytest.fixture
def small(monkeypatch):
    """Both datasets have a thousand generated examples."""

    def draw(data="auto", *, data_dir=None):
        sizes = {"train": 1024, "test": 200}
        return tuple(synthetic_fashion(split, size=n) for split, n in sizes.items())

    monkeypatch.setattr(eqxshard.data, "load_fashion_mnist", draw)


def run(*options, **settings):
    """The same in a process of its own."""
    return finished([sys.executable, SCRIPT, *options], env=environment(**settings))


# Options


def test_every_option_is_in_the_help(main):
    status, out, err = main("--help")
    assert (status, err) == (0, "")
    assert set(re.findall(r"(?m)^[│ ] +(--[a-z]+(?:-[a-z]+)*)", out)) == {
        *("--model", "--optimizer", "--learning-rate", "--rule", "--data", "--data-dir"),
        *("--epochs", "--steps", "--batch-size", "--seed", "--devices", "--mesh"),
        *("--output", "--resume", "--save-every", "--evaluate-every", "--log-every"),
        *("--track", "--hang-seconds", "--profile"),
    }


MISTAKES = {
    "--model lent": "invalid choice 'lent' for argument '--model'. Expected one of",
    "--rule fsdb": "invalid choice 'fsdb' for argument '--rule'. Expected one of",
    "--optimizer adm": "invalid choice 'adm' for argument '--optimizer'. Expected one of",
    "--data fashion": "invalid choice 'fashion' for argument '--data'. Expected one of",
    "--learning-rate 0": "--learning-rate 0.0 must be positive and finite",
    "--learning-rate -0.1": "--learning-rate -0.1 must be positive and finite",
    "--learning-rate nan": "--learning-rate nan must be positive and finite",
    "--learning-rate inf": "--learning-rate inf must be positive and finite",
    "--batch-size 255": "batch size 255 does not divide over data=8 x fsdp=1",
    "--batch-size 1032": "--batch-size 1032 is more than the 1024 examples",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(main, small, tmp_path, options):
    """A warning of synthetic data comes only with runs that start."""
    status, out, err = main("--devices", 8, "--output", tmp_path / "run", *options.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert MISTAKES[options] in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", ["fashion_mnist", "auto"])
def test_damaged_data_are_named(main, tmp_path, data):
    """`auto` is for missing data: damage is never passed over."""
    path = tmp_path / "data" / "fashion_mnist" / IMAGES
    path.parent.mkdir(parents=True)
    damaged = gzip.compress(bytes(99))
    path.write_bytes(damaged)
    result = main("--data", data, "--data-dir", tmp_path / "data", "--output", "run")
    assert_refused(result, f"error: {path} is damaged: ")
    assert path.read_bytes() == damaged and not os.path.exists("run")


def test_the_data_dir_is_the_flag_then_the_variable_then_the_cache(
    main, tmp_path, monkeypatch
):
    options = ["--data", "fashion_mnist"]
    assert_refused(main(*options), f"nor in {tmp_path / 'cache' / 'eqxshard'}, and")
    monkeypatch.setenv("EQXSHARD_DATA_DIR", str(tmp_path / "variable"))
    assert_refused(main(*options), f"nor in {tmp_path / 'variable'}, and")
    flag = tmp_path / "flag"
    assert_refused(main(*options, "--data-dir", flag), f"nor in {flag}, and")


# Runs


def assert_a_whole_run(result, output, *, data, synthetic):
    status, out, err = result
    assert status == 0, err
    *_, last = out.splitlines()
    match = LAST_LINE.fullmatch(last)
    assert match, last
    lines = read_lines(output)
    assert all(line["data"] == data for line in lines)
    assert all(math.isfinite(line["train/loss"]) for line in lines[:-1])
    assert lines[-1]["epoch"] == 1
    summary = json.loads((output / "summary.json").read_text())
    assert summary["data"] == data
    assert summary["test_accuracy"] == lines[-1]["eval/accuracy"]
    assert f"test accuracy {summary['test_accuracy']:.4f} " in last
    assert (output / "curves.png").read_bytes().startswith(PNG)
    assert last[last.index("MLP") :] in err.splitlines()
    # Wherever there are numbers, it says what they were measured on.
    said = ["SYNTHETIC DATA" in err, match[2] is not None, "ynthetic" in out + err]
    assert said == [synthetic] * 3
    return summary


@pytest.mark.slow
def test_a_run_on_synthetic_data(tmp_path):
    options = ["--data", "synthetic", "--model", "mlp", "--epochs", "1"]
    result = run(*options, "--output", tmp_path)
    summary = assert_a_whole_run(result, tmp_path, data="synthetic", synthetic=True)
    assert summary["test_accuracy"] > 0.6
    assert summary["images_per_second"] == 60_000 / summary["seconds_per_epoch"]
    assert summary["parameters"] == 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    settings = summary["settings"]
    assert (settings["model"], settings["epochs"]) == ("mlp", 1)
    assert "Requested with data='synthetic'." in result[2]


@needs_real_data
def test_a_run_on_the_real_data(tmp_path):
    result = run("--model", "mlp", "--epochs", "1", EQXSHARD_DATA_DIR=REAL)
    output = tmp_path / "runs" / "fashion_mnist-mlp"
    summary = assert_a_whole_run(result, output, data="fashion_mnist", synthetic=False)
    assert summary["test_accuracy"] > 0.8


@pytest.mark.thorough
def test_auto_without_the_data_says_so_everywhere(main, monkeypatch, tmp_path):
    small = partial(synthetic_fashion, size=512)
    module = sys.modules["eqxshard.data._fashion_mnist"]
    monkeypatch.setattr(module, "synthetic_fashion", small)
    options = ["--model", "mlp", "--epochs", "1", "--devices", "2", "--batch-size", "64"]
    result = main(*options, "--output", tmp_path)
    assert_a_whole_run(result, tmp_path, data="synthetic", synthetic=True)
    box = " ".join(result[2].replace("│", " ").split())
    assert "NOT on Fashion-MNIST" in box
    assert f"{IMAGES}, and it could not be downloaded" in box


def numbers(output):
    """The losses and accuracies of a run, by line."""
    return [
        [value for name, value in line.items() if re.search("loss|accuracy", name)]
        for line in read_lines(output)
    ]


SPLIT = ["--mesh", "data=2,fsdp=2", "--rule", "fsdp"]


@pytest.mark.thorough
def test_a_split_run_has_the_same_numbers(main, small, tmp_path):
    options = ["--model", "mlp", "--epochs", "1", "--batch-size", "64"]
    one = tmp_path / "one"
    assert main(*options, "--devices", "1", "--output", one)[0] == 0
    for split, mesh in ((SPLIT, "data=2, fsdp=2"), (["--rule", "tensor"], "tensor=4")):
        four = tmp_path / mesh
        status, out, _ = main(*options, "--devices", "4", *split, "--output", four)
        assert status == 0
        assert f" | MLP on 4 x cpu ({mesh})" in out
        for ours, theirs in zip(numbers(four), numbers(one), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(
    "model, optimizer",
    graded([("lenet", "adamw"), ("cnn", "adam"), ("mlp", "sgd")], slow=[("cnn", "adam")]),
)
def test_every_model_and_optimizer_learns(main, small, tmp_path, model, optimizer):
    options = ["--model", model, "--optimizer", optimizer, "--epochs", "3"]
    speed = ["--batch-size", "64", "--devices", "2", "--output", tmp_path]
    status, _, err = main(*options, *speed)
    assert status == 0, err
    losses = [line["train/loss"] for line in read_lines(tmp_path) if "train/loss" in line]
    assert losses[-1] < 0.8 * losses[0]


# Whole runs, killed and in several processes


ONE_EPOCH = ["--data", "synthetic", "--model", "mlp", "--epochs", 1, "--save-every", 20]


def saved_steps(output):
    return eqxshard.Checkpointer(output / "checkpoints").steps()


def wait_for_checkpoints(process, output):
    while process.poll() is None and len(saved_steps(output)) < 3:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of one process that was never stopped."""
    output = tmp_path_factory.mktemp("whole") / "run"
    status, _, err = run(*ONE_EPOCH, "--devices", 2, "--output", output)
    assert status == 0, err
    return output


@pytest.mark.thorough
def test_a_killed_run_resumes_as_if_it_had_not(whole, tmp_path):
    killed = tmp_path / "killed"
    options = [*ONE_EPOCH, "--devices", 2]
    command = [sys.executable, SCRIPT, *options, "--output", killed]
    with started(command, env=environment()) as process:
        wait_for_checkpoints(process, killed)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    at = saved_steps(killed)[-1]
    assert 60 <= at < 235
    status, out, err = run(*options, "--output", killed, "--resume")
    assert status == 0, err
    assert f"resuming from step {at}." in out.splitlines()
    assert measured(killed) == measured(whole)


def launcher(output, *options, restarts=0, script=SCRIPT):
    """The command for two processes with a device each."""
    how = ["--processes=2", "--devices-per-process=1", f"--restarts={restarts}"]
    command = [sys.executable, "-m", "eqxshard.launch", *how, script]
    return [*command, *ONE_EPOCH, "--output", output, *options]


def launch(*args, **how):
    """Its status, and everything that was printed."""
    status, out, err = finished(launcher(*args, **how), env=environment())
    return status, out + err


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run of two processes, and what they printed."""
    output = tmp_path_factory.mktemp("two") / "run"
    status, out = launch(output)
    assert status == 0, out
    return output, out


@pytest.mark.thorough
def test_two_processes_are_one_run(two, whole):
    output, out = two
    ours, theirs = measured(output), measured(whole)
    for line, expected in zip(ours, theirs, strict=True):
        assert line.pop("data") == expected.pop("data") == "synthetic"
        assert line == pytest.approx(expected, rel=2e-5)
    assert ours[-1]["eval/accuracy"] == theirs[-1]["eval/accuracy"]
    assert saved_steps(output) == saved_steps(whole)
    # Process 0 alone prints, as one process does.
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith("[0] ")] == []
    assert sum("SYNTHETIC DATA" in line for line in lines) == 1


@pytest.mark.thorough
def test_a_run_continues_when_one_of_its_processes_is_killed(two, tmp_path):
    with started(
        launcher(tmp_path, "--resume=auto", restarts=1),
        env=environment(),
        stderr=subprocess.STDOUT,
    ) as process:
        wait_for_checkpoints(process, tmp_path)
        os.kill(workers_of(process)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "process 1 of 2 was killed by SIGKILL" in out
    assert re.search(r"(?m)^\[0\] resuming from step (60|80|1\d0|2\d0)\.$", out), out
    assert measured(tmp_path) == measured(two[0])


@pytest.mark.slow
def test_a_mistake_is_one_line_from_each_process(tmp_path):
    status, out = launch(tmp_path / "run", "--devices=1")
    assert status == 2
    says = "error: 1 devices are not all 2 of 2 processes; use all of them,"
    printed = [line for line in out.splitlines() if line.startswith("[")]
    assert {line[: 4 + len(says)] for line in printed} == {f"[0] {says}", f"[1] {says}"}
    assert len(printed) == 2


ONE_HAS_DATA = f"""
import os, runpy
import eqxshard
if os.environ["EQXSHARD_PROCESS"] == "0":
    def load(data, *, data_dir=None):
        found = eqxshard.data.synthetic_fashion("train")
        found.name = "fashion_mnist"
        return found, found
    eqxshard.data.load_fashion_mnist = load
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.thorough
def test_hosts_with_different_data_do_not_start(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ONE_HAS_DATA)
    status, out = launch(tmp_path / "run", script=script)
    assert status == 2
    says = (
        '"fashion_mnist" in process 0; "synthetic" in process 1. Start all of them alike.'
    )
    for number in range(2):
        line = f"[{number}] error: the processes of this run differ in data name: {says}"
        assert line in out


@pytest.mark.thorough
def test_a_second_start_compiles_nothing(tmp_path):
    compiled = tmp_path / "compiled"
    options = ["--data", "synthetic", "--model", "mlp", "--steps", 40, "--save-every", 20]

    def entries(number):
        where = {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
        status, _, err = run(*options, "--output", tmp_path / number, **where)
        assert status == 0, err
        return {entry.name for entry in compiled.glob("*-cache")}

    first = entries("first")
    assert any(name.startswith("jit_train_step-") for name in first)
    assert entries("second") == first
