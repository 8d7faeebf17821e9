"""Each benchmark runs and writes its results; no test checks how fast anything is."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grades import graded

ROOT = Path(__file__).parents[1]

#: Options that make each benchmark short.
SHORT = {
    "backtest": "--stored",
    "checkpoint": "--gigabytes 0.01",
    "data": "--seconds 0.05 --mapped-gigabytes 0.05 --workers 1",
    "epoch": "--models lenet --devices 1 --examples 960 --device cpu",
    "first_call": "--dense 2 --blocks 1 --listed 2",
    "fit_overhead": "--steps 20",
    "gpt": "--device cpu",
    "images": "--images 40 --batch-size 8 --seconds 0.05 --workers 1",
    "growth": "--parameters 64 256 --leaves 2 4 --layers 1 2 --steps 1 2 --depths 2 "
    "--listed 2 4 --models --examples 1000 --seconds 0.05",
    "gpu_compiled": "--models mlp",
    "memory": "--depth 2 --width 64 --batch-size 64",
    "scaling": "--devices 2 --processes 2 --steps 1",
    "start": "",
    "step_overhead": "--depths 2 --seconds 0.01",
}


def run(name, output, *options):
    """Run a benchmark for one round, and read what it wrote."""
    script = ROOT / "benchmarks" / f"{name}.py"
    options = [*SHORT[name].split(), *options, "--rounds", "1", "--output", output]
    process = subprocess.run(
        [sys.executable, script, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
    assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((output / f"{name}.json").read_text())
    assert results["versions"]["eqxshard"] and results["contests"]
    for contest in results["contests"]:
        for figures in contest["values"].values():
            assert len(figures) == 1 and figures[0] > 0, contest
    return results


def test_every_benchmark_is_run_here_and_by_nox():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert SHORT.keys() == scripts
    assert all(
        f'"{name}": ' in (ROOT / "benchmarks/_run.py").read_text() for name in scripts
    )


@pytest.mark.parametrize(
    "name", graded(sorted(SHORT.keys() - {"gpt", "gpu_compiled"}), slow=["memory"])
)
def test_a_benchmark_writes_its_results(name, tmp_path):
    run(name, tmp_path)


def test_two_checkouts_are_compared_in_turn(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    driver, order = importlib.import_module("_before_after"), []

    def measure(checkout, name, options):
        order.append(checkout.name)
        return {("depth 4", "us/step", "eqxshard"): 20 if checkout == ROOT else 10}

    monkeypatch.setattr(driver, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["x", "before", "step_overhead", "--rounds", "2"])
    driver.main()
    assert order == ["before", ROOT.name, ROOT.name, "before"]
    assert "2.000, 2.000 to 2.000" in capsys.readouterr().out


@pytest.mark.gpu
def test_steps_are_compiled_for_a_gpu_and_read(tmp_path):
    results = run("gpu_compiled", tmp_path)
    figures = {contest["unit"]: contest["values"] for contest in results["contests"]}
    # The guard reads all gradients; many steps in one program launch no more each.
    moved, kernels = figures["MB moved/step"], figures["kernels/step"]
    ignore, skip = "eqxshard, nonfinite='ignore'", "eqxshard, nonfinite='skip'"
    assert moved[skip][0] >= moved[ignore][0] >= moved["jax.jit"][0] * 0.99
    assert kernels[skip][0] >= kernels[ignore][0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_gpt_learns_the_same_as_in_pytorch(tmp_path):
    results = run("gpt", tmp_path, "--devices", "2", "--steps", "5")
    reference, *others = results["losses"].values()
    assert len(others) == 3 and len(reference) == 2
    assert reference[1] < reference[0] - 0.1
    for losses in others:
        assert losses == pytest.approx(reference, rel=1e-5)


@pytest.mark.thorough
def test_what_runs_on_a_gpu_was_rehearsed(tmp_path):
    rehearsed = "gpt_124m profile_gpt gpt_1b shakespeare_gpu"
    settings = {"PYTHON": sys.executable, "REHEARSE": "1", "ONLY": rehearsed}
    process = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu.sh", tmp_path],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout
    summary = process.stdout.split("== summary")[1].splitlines()[1:]
    wanted = [[part, "done"] for part in rehearsed.split()]
    assert [line.split()[::3] for line in summary] == wanted
