"""Estimates of how long work takes: by hand, and by runs that others published."""

import dataclasses
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from eqxshard.compiled._communication import find_collectives
from eqxshard.compiled._hlo import parse_module
from eqxshard.planning import Efficiency, Target
from eqxshard.planning._efficiency import Work, idle
from eqxshard.planning._timeline import Timeline

ROOT = Path(__file__).parents[2]
REACHED = Efficiency(
    products=0.5,
    tiles=True,
    attention=0.25,
    memory=0.8,
    launch=0.1,
    power=600.0,
    exponent=0.5,
)


def test_kinds_of_work_take_longer_each_by_their_own_efficiency():
    work = Work(least=7.0, products=2.0, attention=1.0, memory=4.0, kernels=10)
    assert Efficiency().seconds(work, None) == 7.0
    assert REACHED.seconds(work, None) == pytest.approx(4 + 4 + 5 + 1)
    # Only arithmetic is slower with less power.
    assert REACHED.seconds(work, 150.0) == pytest.approx(2 * (4 + 4) + 5 + 1)
    half = dataclasses.replace(REACHED, overall=0.5)
    assert half.seconds(work, None) == pytest.approx(2 * 14)


def test_kernels_take_longer_beside_a_collective():
    reached = Efficiency(contention=0.5)
    work = Work(least=10.0, products=10.0, kernels=3)
    assert reached.seconds(work, None) == 10
    # Of the 6 s, 4 are done, and then 6 are left.
    assert reached.seconds(work, None, beside=6.0) == pytest.approx(12)
    assert reached.seconds(work, None, beside=100.0) == pytest.approx(15)


#: Widths of 64, which leave most of a GPU idle.
SMALL = """
ENTRY %main (x: f32[4096,64], y: f32[64,64], p: f32[8,64]) -> f32[4096,64] {
  %x = f32[4096,64]{1,0} parameter(0)
  %y = f32[64,64]{1,0} parameter(1)
  %p = f32[8,64]{1,0} parameter(2)
  %z = f32[4096,64]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = (f32[8,64], f32[64,64]) all-gather-start(%p), replica_groups=[1,8]<=[8], a=1
  %w = f32[4096,64]{1,0} dot(%z, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[64,64]{1,0} all-gather-done(%s)
  ROOT %v = f32[4096,64]{1,0} dot(%w, %d), lhs_contracting_dims={1}
}
"""


@pytest.mark.parametrize("name", ["h200", "tpu-v5p"])
def test_an_overall_efficiency_is_that_of_the_whole_step(name):
    module = parse_module(SMALL)
    operations = list(find_collectives(module, 8))
    # As slow as that, products wait for arithmetic.
    target = dataclasses.replace(Target.named(name), flops={"float32": 1e9}, link=1e5)
    least = Timeline(module, operations, target).length
    half = Timeline(module, operations, target, Efficiency(overall=0.5)).length
    assert half == pytest.approx(2 * least)
    reached = Target.named("h200").efficiency
    assert reached is not None
    about = Timeline(module, operations, target, reached).length
    reached = dataclasses.replace(reached, overall=0.25)
    slow = Timeline(module, operations, target, reached).length
    assert slow == pytest.approx(4 * about) and about > 1.1 * least


def test_the_shape_of_a_product_leaves_cores_idle():
    large = idle(16384, 8192, 8192, 1, 132)
    assert 0 < large < 0.05
    # One tile more than all cores have needs another wave; a short depth begins and ends.
    assert idle(128 * 133, 256, 8192, 1, 132) == pytest.approx(0.5, abs=0.01)
    assert idle(128 * 132, 256, 64, 1, 132) == pytest.approx(0.5)
    assert idle(128, 256, 4096, 1, 132) > 0.99


def test_collectives_take_their_latency_and_what_a_board_has_for_them():
    text = (
        "ENTRY %main (p: f32[8,32]) -> f32[16,32] {\n"
        "  %p = f32[8,32]{1,0} parameter(0)\n"
        "  ROOT %g = f32[16,32]{1,0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}"
        "\n}\n"
    )
    module = parse_module(text)
    operations = list(find_collectives(module, 2))
    at_peak = dataclasses.replace(
        Target.named("h200"),
        link=1024.0,
        per_host=4,
        flops={"float32": 1.0},
    )
    reached = Efficiency(link=0.5, latency=0.25)
    assert Timeline(module, operations, at_peak).length == pytest.approx(1)
    about = Timeline(module, operations, at_peak, reached)
    assert about.length == pytest.approx(2.25)
    # Each of four has a third of its links to each of the others.
    board = dataclasses.replace(at_peak, switched=False)
    assert Timeline(module, operations, board).length == pytest.approx(3)


@pytest.fixture(scope="module")
def backtest():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        module = importlib.import_module("backtest")
        tables = tomllib.loads((ROOT / "benchmarks/published.toml").read_text())["run"]
        steps = json.loads(module.STORED.read_text())
        yield module, [module.Run(*each) for each in zip(tables, steps, strict=True)]


def test_the_documented_figures_are_those_of_the_back_test(backtest):
    module, runs = backtest
    efficiency = Target.named("h200").efficiency
    errors = module.judge(runs, efficiency)
    page = (ROOT / "docs/pages/guide/backtest.md").read_text()
    for name, error in errors.items():
        assert re.search(rf"\| {name}[^|]*\|[^|]*\| {100 * error:.1f} % \|", page), name
    readme = (ROOT / "README.md").read_text()
    said = re.search(r"(\d+) published runs.*?median\s+error of (\d+) %", readme, re.DOTALL)
    assert said and int(said[1]) == len(runs) and said[2] == f"{100 * errors['about']:.0f}"
    assert errors["about"] < 0.15 and not module.misordered(
        module.half(runs, "held"), efficiency
    )
    for run in runs:
        about = run.table["published"] / run.ratio(efficiency)
        row = rf"\| {re.escape(run.table['name'])} \|.*\| {about:,.0f} \|"
        assert re.search(row, page), run.table["name"]


def test_halves_alternate(backtest):
    _, runs = backtest
    assert [run.table["half"] for run in runs] == ["fit", "held"] * (len(runs) // 2)


@pytest.mark.slow
def test_the_fit_gives_the_efficiencies_of_targets(backtest):
    module, runs = backtest
    fitted = module.fit(module.half(runs, "fit"))
    known = Target.named("h100").efficiency
    assert known is not None and fitted == dataclasses.replace(known, power=None)
