"""The recipe for Fashion-MNIST: its options, its data, and that every model learns.

`eqxshard.train` and `eqxshard.cli`, which it uses, are tested in tests/run.
"""

import gzip
import json
import os
import re
import sys
from functools import partial

import pytest
from helpers import REAL, needs_real_data
from process_helpers import finished
from run_helpers import PNG, ROOT, assert_refused, call, environment, read_lines

import eqxshard

SCRIPT = ROOT / "recipes" / "fashion_mnist.py"
IMAGES = "train-images-idx3-ubyte.gz"
#: Nothing listens there, so that nothing is downloaded.
NO_PROXY = "http://127.0.0.1:9/"
LAST_LINE = re.compile(
    r"test accuracy 0\.\d{4} \| [\d,.]+ s/epoch \| [\d,.]+ images/s"
    r" \| MLP on \d+ x cpu \(data=\d+\)"
)
synthetic_fashion = eqxshard.data.synthetic_fashion


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Keep tests away from the user's own data and folders, and from the internet."""
    monkeypatch.delenv("EQXSHARD_DATA_DIR", raising=False)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setenv("https_proxy", NO_PROXY)
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
    """Runs the recipe in a process of its own; returns the same."""
    return finished([sys.executable, SCRIPT, *options], env=environment(**settings))


MISTAKES = {
    "--learning-rate nan": "--learning-rate nan is not positive and finite",
    "--batch-size 1032": "--batch-size 1032 is more than the 1024 examples",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(main, small, tmp_path, options):
    """A warning of synthetic data comes only with runs that start."""
    result = main("--devices", 8, "--output", tmp_path / "run", *options.split())
    assert_refused(result, MISTAKES[options])
    assert not (tmp_path / "run").exists()


def test_damaged_data_are_named(main, tmp_path):
    """`auto` is for missing data: damage is never passed over."""
    path = tmp_path / "data" / "fashion_mnist" / IMAGES
    path.parent.mkdir(parents=True)
    damaged = gzip.compress(bytes(99))
    path.write_bytes(damaged)
    result = main("--data", "auto", "--data-dir", tmp_path / "data", "--output", "run")
    assert_refused(result, f"error: {path} is damaged: ")
    assert path.read_bytes() == damaged and not os.path.exists("run")


# Runs


@pytest.mark.slow
@needs_real_data
def test_a_run_on_the_real_data(tmp_path):
    status, out, err = run("--model", "mlp", "--epochs", "1", EQXSHARD_DATA_DIR=REAL)
    assert status == 0, err
    last = out.splitlines()[-1]
    assert LAST_LINE.fullmatch(last), last
    assert "ynthetic" not in (out + err).lower()
    folder = tmp_path / "runs" / "fashion_mnist-mlp"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["data"] == "fashion_mnist" and summary["test_accuracy"] > 0.8
    assert f"test accuracy {summary['test_accuracy']:.4f} " in last
    assert (folder / "curves.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_convolutional_model_learns(main, small, tmp_path):
    options = ["--epochs", 2, "--batch-size", 64, "--devices", 2, "--output", tmp_path]
    status, _, err = main("--model", "lenet", *options)
    assert status == 0, err
    losses = [line["train/loss"] for line in read_lines(tmp_path) if "train/loss" in line]
    assert losses[-1] < 0.8 * losses[0]
