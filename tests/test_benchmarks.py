"""Each benchmark runs, and writes what it found; how fast anything is, no test says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path
    for path in Path(__file__).parents[1].joinpath("benchmarks").glob("*.py")
    if not path.name.startswith("_")
)

#: What makes each of them short.
SMALL = {
    "checkpoint": "--gigabytes 0.01",
    "data": "--seconds 0.05 --mapped-gigabytes 0.05 --workers 1",
    "epoch": "--models lenet --devices 1 --examples 960 --device cpu",
    "growth": "--devices 1 2 --depths 2 --examples 1000 --seconds 0.05",
    "memory": "--depth 2 --width 64 --batch-size 64",
    "start": "",
    "step_overhead": "--depths 2 --seconds 0.01",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_benchmark_writes_what_it_found(script, tmp_path):
    assert script.stem in SMALL, f"say in SMALL what makes {script.name} short"
    options = [*SMALL[script.stem].split(), "--rounds", "1", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout

    assert (tmp_path / f"{script.stem}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{script.stem}.json").read_text())
    assert found["name"] == script.stem and found["versions"]["eqxshard"]
    assert found["contests"]
    for contest in found["contests"]:
        values, ratios = contest["values"], contest["ratios"]
        assert values.keys() == ratios.keys()
        for name, figures in values.items():
            assert len(figures) == 1 and figures[0] > 0, (contest["title"], name, figures)
        assert ratios[next(iter(values))] == 1
