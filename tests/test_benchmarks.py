"""Each benchmark runs and writes its results; no test checks how fast anything is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_")
)

#: Options that make each benchmark short.
SHORT = {
    "checkpoint": "--gigabytes 0.01",
    "data": "--seconds 0.05 --mapped-gigabytes 0.05 --workers 1",
    "epoch": "--models lenet --devices 1 --examples 960 --device cpu",
    "fit_overhead": "--steps 20",
    "gpt": "--device cpu",
    "images": "--images 40 --batch-size 8 --seconds 0.05 --workers 1",
    "growth": "--devices 2 --depths 2 --examples 1000 --seconds 0.05",
    "memory": "--depth 2 --width 64 --batch-size 64",
    "start": "",
    "step_overhead": "--depths 2 --seconds 0.01",
}


def run(script, output, *options):
    """Run a benchmark for one round, and read its results."""
    options = [*SHORT[script.stem].split(), *options, "--rounds", "1"]
    process = subprocess.run(
        [sys.executable, str(script), *options, "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
    return json.loads((output / f"{script.stem}.json").read_text())


@pytest.mark.slow
# That of the language model is run by what is rehearsed for GPUs.
@pytest.mark.parametrize("name", [x.stem for x in SCRIPTS if x.stem != "gpt"])
def test_a_benchmark_writes_its_results(name, tmp_path):
    assert name in SHORT, f"add options to SHORT that make {name}.py short"
    run(ROOT / "benchmarks" / f"{name}.py", tmp_path)
    assert_complete(tmp_path, name)


def assert_complete(folder, name):
    """A benchmark of one round wrote its figures and its plot."""
    results = json.loads((folder / f"{name}.json").read_text())
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert results["name"] == name and results["versions"]["eqxshard"]
    assert results["contests"]
    for contest in results["contests"]:
        values, ratios = contest["values"], contest["ratios"]
        assert values.keys() == ratios.keys()
        for name, figures in values.items():
            assert len(figures) == 1 and figures[0] > 0, (contest["title"], name, figures)
        assert ratios[next(iter(values))] == 1


@pytest.mark.slow
def test_step_overhead_compares_two_checkouts(tmp_path):
    script = ROOT / "benchmarks" / "step_overhead.py"
    results = run(script, tmp_path, "--against", str(ROOT))

    contests = {contest["title"]: contest["values"] for contest in results["contests"]}
    assert contests.keys() == {"depth 2, nonfinite='ignore'", "depth 2, nonfinite='skip'"}
    for values in contests.values():
        assert values.keys() == {ROOT.name, "this checkout"}
        assert all(len(figures) == 1 and figures[0] > 0 for figures in values.values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_gpt_learns_the_same_as_in_pytorch(tmp_path):
    script = ROOT / "benchmarks" / "gpt.py"
    results = run(script, tmp_path, "--devices", "2", "--steps", "5")

    reference, *others = results["losses"].values()
    assert len(others) == 3 and len(reference) == 2
    assert reference[1] < reference[0] - 0.1
    for losses in others:
        assert losses == pytest.approx(reference, rel=1e-5)


@pytest.mark.slow
def test_all_that_runs_on_a_gpu_was_rehearsed(tmp_path):
    environment = {"PYTHON": sys.executable, "REHEARSE": "1"}
    environment["ONLY"] = "gpt_124m profile_gpt gpt_1b shakespeare_gpu"
    process = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), str(tmp_path)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
    summary = process.stdout.split("== summary")[1].splitlines()[1:]
    parts = environment["ONLY"].split()
    assert [line.split()[::3] for line in summary] == [[part, "done"] for part in parts]
    assert_complete(tmp_path, "gpt")
    assert_complete(tmp_path, "gpt_tiny")
    (trace,) = (tmp_path / "profile_gpt").glob("*.xplane.pb")
    assert trace.stat().st_size
    loss = json.loads((tmp_path / "shakespeare" / "shakespeare.json").read_text())["best"]
    assert len(loss["values"]) == 2 and 0 < loss["mean"] < 10
