"""The smallest recipe, and mistakes in the options of two."""

import json
import re
import sys

import pytest
from process_helpers import finished
from run_helpers import ROOT, assert_refused, call, environment, read_lines


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def run(recipe, *options):
    """The status of a recipe in a process of its own, its stdout and its stderr."""
    # JAX 0.10.1 writes to stderr for each program that it has from its cache.
    settings = environment(JAX_ENABLE_COMPILATION_CACHE="false")
    command = [sys.executable, ROOT / "recipes" / recipe, *options]
    return finished(command, seconds=600, env=settings)


@pytest.mark.slow
def test_the_sine_is_learned(tmp_path):
    options = ["--steps", 300, "--devices", 2, "--log-every", 10]
    status, out, err = run("regression.py", *options)
    assert status == 0, err
    line = (
        r"test loss (0\.\d+) \| .* s/epoch \| .* examples/s \| sine on 2 x cpu \(data=2\)"
    )
    match = re.fullmatch(line, out.splitlines()[-1])
    assert match, out
    folder = tmp_path / "runs" / "regression-sine"
    first, *_, last = (x["train/loss"] for x in read_lines(folder) if "train/loss" in x)
    assert 0.3 < first < 2 and last < first / 5
    assert float(match[1]) < first / 5
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['test_loss']:.4f}" == match[1]


@pytest.mark.parametrize(
    "recipe, options, sentence",
    [
        ("regression.py", ["--batch-size", 3], "batch size 3 does not divide"),
        ("regression.py", ["--steps", 0], "--steps 0 is too small; use 1 or more"),
        ("parallel_tour.py", ["--devices", 0], "0 devices were asked for"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, recipe, options, sentence):
    result = call(capsys, monkeypatch, ROOT / "recipes" / recipe, *options)
    assert_refused(result, sentence)


@pytest.mark.thorough
def test_all_strategies_of_the_tour_end_at_the_same_loss():
    status, out, err = run("parallel_tour.py", "--steps", 4)
    assert status == 0, err
    last = out.splitlines()[-1]
    assert last.startswith("all strategies end at the same loss: within ")
