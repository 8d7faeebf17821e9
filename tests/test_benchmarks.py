"""Each benchmark runs and writes its results; no test checks how fast anything is."""

import json
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
    "growth": "--devices 1 2 --depths 2 --examples 1000 --seconds 0.05",
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
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_benchmark_writes_its_results(script, tmp_path):
    assert script.stem in SHORT, f"add options to SHORT that make {script.name} short"
    results = run(script, tmp_path)

    assert (tmp_path / f"{script.stem}.png").read_bytes().startswith(b"\x89PNG")
    assert results["name"] == script.stem and results["versions"]["eqxshard"]
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
