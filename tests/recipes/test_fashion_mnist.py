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


MISTAKES = {
    "--rule fsdb": "invalid choice 'fsdb' for argument '--rule'. Expected one of",
    "--learning-rate nan": "--learning-rate nan must be positive and finite",
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


@pytest.mark.slow
@needs_real_data
def test_a_run_on_the_real_data(tmp_path):
    result = run("--model", "mlp", "--epochs", "1", EQXSHARD_DATA_DIR=REAL)
    output = tmp_path / "runs" / "fashion_mnist-mlp"
    summary = assert_a_whole_run(result, output, data="fashion_mnist", synthetic=False)
    assert summary["test_accuracy"] > 0.8


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


# Two processes

ONE_EPOCH = ["--data", "synthetic", "--model", "mlp", "--epochs", 1, "--save-every", 20]


def launcher(output, *options, restarts=0):
    """The command for two processes with a device each."""
    how = ["--processes=2", "--devices-per-process=1", f"--restarts={restarts}"]
    command = [sys.executable, "-m", "eqxshard.launch", *how, SCRIPT]
    return [*command, *ONE_EPOCH, "--output", output, *options]


@pytest.mark.thorough
def test_a_run_continues_when_one_of_its_processes_is_killed(tmp_path):
    """It ends as one that was never stopped, and as one of a single process."""
    killed, whole, alone = (tmp_path / name for name in ("killed", "whole", "alone"))
    command = launcher(killed, "--resume=auto", restarts=1)
    checkpoints = eqxshard.Checkpointer(killed / "checkpoints")
    with started(command, env=environment(), stderr=subprocess.STDOUT) as process:
        while process.poll() is None and len(checkpoints.steps()) < 3:
            time.sleep(0.01)
        os.kill(workers_of(process)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "process 1 of 2 was killed by SIGKILL" in out
    assert re.search(r"(?m)^\[0\] resuming from step \d+\.$", out), out
    status, out, err = finished(launcher(whole), env=environment())
    assert status == 0, err
    # Process 0 alone prints, as one process does.
    assert [line for line in out.splitlines() if not line.startswith("[0] ")] == []
    assert measured(killed) == measured(whole)
    assert run(*ONE_EPOCH, "--devices", 2, "--output", alone)[0] == 0
    for ours, theirs in zip(measured(whole), measured(alone), strict=True):
        assert ours.pop("data") == theirs.pop("data") == "synthetic"
        assert ours == pytest.approx(theirs, rel=2e-5)
