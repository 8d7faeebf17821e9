"""Each benchmark runs and writes its results; no test checks how fast anything is."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from grades import graded

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
    "growth": "--parameters 64 256 --leaves 2 4 --layers 1 2 --steps 1 2 --depths 2 "
    "--listed 2 4 --models --examples 1000 --seconds 0.05",
    "gpu_compiled": "--models mlp",
    "memory": "--depth 2 --width 64 --batch-size 64",
    "scaling": "--devices 2 --processes 2 --steps 1",
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


@pytest.mark.parametrize(
    "name",
    graded(
        # That of the language model is run by what is rehearsed for GPUs.
        [x.stem for x in SCRIPTS if x.stem not in ("gpt", "gpu_compiled")],
        slow=["memory"],
    ),
)
def test_a_benchmark_writes_its_results(name, tmp_path):
    assert name in SHORT, f"add options to SHORT that make {name}.py short"
    run(ROOT / "benchmarks" / f"{name}.py", tmp_path)
    assert_complete(tmp_path, name)


@pytest.mark.gpu
def test_steps_are_compiled_for_a_gpu_and_read(tmp_path):
    results = run(ROOT / "benchmarks" / "gpu_compiled.py", tmp_path)
    assert_complete(tmp_path, "gpu_compiled")
    figures = {contest["unit"]: contest["values"] for contest in results["contests"]}
    # The guard reads all gradients; many steps in one program launch no more each.
    moved, kernels = figures["MB moved/step"], figures["kernels/step"]
    ignore, skip = "eqxshard, nonfinite='ignore'", "eqxshard, nonfinite='skip'"
    assert moved[skip][0] >= moved[ignore][0] >= moved["jax.jit"][0] * 0.99
    assert kernels[skip][0] >= kernels[ignore][0]


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


def write_script(folder, name):
    """A benchmark that notes that it ran, and writes a result."""
    lines = f"""
        from pathlib import Path
        with open(r"{folder}/ran", "a") as file:
            file.write("{name} ")
        Path(r"{folder}/{name}.json").write_text("")
    """
    (folder / f"{name}.py").write_text(textwrap.dedent(lines))


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """The module that runs all benchmarks, with two of its own that note when they run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("_run")
    for name in ("first", "second"):
        write_script(tmp_path, name)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(
        module, "ENTRIES", {n: module.Entry(1) for n in ("first", "second")}
    )
    monkeypatch.setattr(module, "find_setting", lambda: {"commit": "one"})
    return module


def test_a_benchmark_that_was_measured_is_skipped(runner, tmp_path, monkeypatch, capsys):
    (tmp_path / "second.py").write_text("import sys; sys.exit(1)")
    assert runner.run_all(["first", "second"], False, tmp_path) == ["second"]
    out = capsys.readouterr().out
    assert "1 of 2: first, about 1.0 min | 0.0 min so far, about 2 min left" in out
    assert "second FAILED" in out

    # Only what failed runs again.
    write_script(tmp_path, "second")
    assert runner.run_all(["first", "second"], False, tmp_path) == []
    assert "first has been measured" in capsys.readouterr().out
    assert (tmp_path / "ran").read_text().split() == ["first", "second"]

    runner.run_all(["first"], True, tmp_path)
    monkeypatch.setattr(runner, "find_setting", lambda: {"commit": "another"})
    runner.run_all(["second"], False, tmp_path)
    assert (tmp_path / "ran").read_text().split() == ["first", "second"] * 2


def test_all_benchmarks_are_run_and_take_at_most_forty_minutes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    entries = importlib.import_module("_run").ENTRIES
    assert entries.keys() == {path.stem for path in SCRIPTS}
    assert sum(entry.minutes for entry in entries.values()) <= 40


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


@pytest.mark.thorough
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
