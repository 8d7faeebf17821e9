import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parent.parent.parent / "recipes"


def run(recipe, *options):
    command = [sys.executable, RECIPES / recipe, *map(str, options)]
    # JAX 0.10.1 says something on stderr of each program that it has from its cache.
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment
    )


def test_the_sine_is_learned():
    done = run("regression.py", "--steps", 300)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    before, after = float(words[2]), float(words[4])
    assert words[-4:] == ["2", "x", "cpu", "(data=2)"]
    assert 0.3 < before < 2 and after < before / 5


@pytest.mark.parametrize(
    "recipe, options, sentence",
    [
        ("regression.py", ["--batch-size", 3], "batch size 3 does not divide"),
        ("regression.py", ["--steps", 0], "steps=0 is not a number of steps"),
        ("parallel_tour.py", ["--devices", 0], "--devices 0 --steps 20 is too few"),
    ],
)
def test_a_mistake_is_one_line(recipe, options, sentence):
    done = run(recipe, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sentence in done.stderr


@pytest.mark.slow
def test_all_strategies_end_at_the_same_loss():
    done = run("parallel_tour.py", "--steps", 4)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("all strategies end at the same loss: within ")
    within = [float(word) for word in last.replace("|", "").split() if "e-" in word]
    assert len(within) == 2 and within[0] < 5e-3 and within[1] < 1e-5
    for words in ("tensor + hybrid", "('tensor', 'fsdp')", "context=8", "psum_scatter"):
        assert words in done.stdout


@pytest.mark.slow
def test_on_few_devices_what_does_not_fit_is_left_out():
    done = run("parallel_tour.py", "--steps", 1, "--devices", 2)
    assert done.returncode == 0, done.stderr
    assert "needs a multiple of 4 devices" in done.stdout
