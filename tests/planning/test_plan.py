import dataclasses
import json

import pytest
from page_parser import parse

import eqxshard
from eqxshard.compiled._hlo import parse_module
from eqxshard.inspect import Finding
from eqxshard.inspect._lint import Findings
from eqxshard.pages._format import format_seconds
from eqxshard.planning import Efficiency, PlannedTime, Target
from eqxshard.planning._read import make_notes
from eqxshard.sharding._text import format_bytes

EMPTY = parse_module("ENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(0)\n}\n")
LONG = PlannedTime(0.1, 0.1, None, {}, None)


def test_it_prints_as_tables(plan):
    text = str(plan)
    assert text.startswith("8 x NVIDIA H200 141GB HBM3e (data=2, fsdp=4), compiled in ")
    for row in ("parameters", "optimizer state", "temporaries (gradients: ", "peak"):
        assert f"│ {row}" in text
    assert "blocks.mlp.up at transformer.py:" in text
    assert "A step takes at least " in text and "bound by fsdp links" in text
    assert "temporaries are an upper estimate" in text
    assert "│ blocks.mlp.up " in text and "P(None" in text
    assert max(map(len, text.split("\n\n")[2].splitlines())) <= 140
    assert parse(plan._repr_html_()).find("pre").text == text


def test_it_is_json(plan):
    values = json.loads(json.dumps(plan.to_json()))
    assert values["memory"]["parameters"] == plan.memory.parameters
    assert values["memory"]["left"] == plan.memory.left
    assert values["time"]["bound"] == plan.time.bound
    assert values["traffic"] == plan.traffic
    assert len(values["collectives"]) == len(plan.collectives)
    assert values["leaves"] == [leaf.to_dict() for leaf in plan.leaves]
    assert values["target"]["name"] == "h200" and "config" not in values["target"]


def test_what_to_expect_is_said_beside_the_least(plan):
    assert plan.time.about is None  # On a CPU there is no schedule.
    about = dataclasses.replace(plan.time, step=4 * plan.time.step, compute=1e-5)
    time = dataclasses.replace(plan.time, about=about)
    said = dataclasses.replace(plan, time=time)
    text, speed = str(said), plan.examples_per_second
    assert 1e7 < speed < 4e7
    least, expected = (format_seconds(x.step) for x in (time, about))
    assert f"A step takes at least {least}, about {expected}, bound by " in text
    assert f"Of about {expected}: compute 10 us" in text
    assert f"At most {round(speed, -4):,.0f} examples/s" in text
    assert f"About {round(speed / 4, -3):,.0f} examples/s" in text
    assert said.to_json()["time"]["about"]["step"] == about.step


def test_what_devices_repeat_counts_once(plan):
    assert plan.repeated == () and plan.mesh == {"data": 2, "fsdp": 4}
    repeats = dataclasses.replace(plan, repeated=("fsdp",))
    assert repeats.mfu == pytest.approx(plan.mfu / 4) and repeats.hfu == plan.hfu


def test_what_is_computed_again_counts_for_hfu_alone(plan):
    # A device at its peak takes 0.2 s for the model in a step of 1 s, and 0.3 s for all.
    peak = plan.target.flops["bfloat16"]
    time = PlannedTime(1.0, 0.3, 0.1, {}, {}, PlannedTime(2.0, 0.6, 0.2, {}, {}))
    flops, of_model = {"bfloat16": 0.3 * peak}, {"bfloat16": 0.2 * peak}
    again = dataclasses.replace(plan, time=time, flops=flops, model_flops=of_model)
    assert (again.mfu, again.hfu) == pytest.approx((0.2, 0.3))
    assert "; 20% MFU; 30% HFU\n" in str(again) and "; 10% MFU; 15% HFU\n" in str(again)
    said = "Arithmetic of a device: 296.9 TFLOP bfloat16; 98.95 TFLOP of it computed again"
    assert said in str(again)
    values = again.to_json()
    assert (values["mfu"], values["hfu"]) == (again.mfu, again.hfu)


@pytest.mark.parametrize("efficiency", [None, Efficiency(overall=0.5), Efficiency()])
def test_a_target_is_calibrated_by_a_measured_step(plan, efficiency):
    about = None if efficiency is None else dataclasses.replace(LONG, step=0.2)
    calibrated = dataclasses.replace(
        plan,
        target=dataclasses.replace(plan.target, efficiency=efficiency),
        time=dataclasses.replace(LONG, about=about),
        timeline=(),
    ).calibrate(0.4)
    assert calibrated.efficiency is not None and calibrated.name == "h200"
    before = 1.0 if efficiency is None else efficiency.overall
    planned = 0.1 if efficiency is None else 0.2
    assert calibrated.efficiency.overall == pytest.approx(before * planned / 0.4)
    with pytest.raises(eqxshard.UsageError, match="no schedule of h200"):
        plan.calibrate(0.4)


def test_a_very_short_step_is_said_to_take_longer(plan):
    assert plan.time.step < 1e-4 and "a step as short as this takes" in str(plan)
    assert not any(
        "short" in said for said in make_notes(plan.target, "cpu", EMPTY, "", LONG)
    )


def test_only_the_largest_are_printed(plan):
    many = tuple(
        dataclasses.replace(plan.leaves[0], path=f"layer{n}", gradient=10**n)
        for n in range(20)
    )
    sent = tuple(
        dataclasses.replace(plan.collectives[0], leaves=(f"sent{n}",), sent=10**n)
        for n in range(20)
    )
    text = str(dataclasses.replace(plan, leaves=many, collectives=sent))
    assert "15 largest of 20 arrays" in text and "15 largest of 20 collectives" in text
    assert "layer5 " in text and "layer4 " not in text
    assert "sent5 " in text and "sent4 " not in text


def test_findings_are_printed_and_written(plan):
    assert plan.findings == () and "not meant" not in str(plan)
    finding = Finding("constant", None, "model.py:3", "a table is compiled in.")
    other = dataclasses.replace(plan, findings=Findings([finding]))
    assert "Most likely not meant:" in str(other) and "model.py:3" in str(other)
    (value,) = json.loads(json.dumps(other.to_json()))["findings"]
    assert value["kind"] == "constant" and value["line"] == "model.py:3"


def test_whether_a_step_fits_is_said(plan):
    needs = format_bytes(plan.memory.peak)
    assert f"It fits: {needs} of {format_bytes(plan.memory.device)}\n" in str(plan)
    memory = dataclasses.replace(plan.memory, device=plan.memory.peak - 1)
    small = dataclasses.replace(plan, memory=memory)
    assert (small.memory.left, small.fits) == (-1, False)
    assert "It does not fit: each device lacks 1 B; split the state over" in str(small)


def test_without_known_speeds_there_is_no_time(plan):
    target = Target.named("cpu")
    memory = dataclasses.replace(plan.memory, device=None)
    other = dataclasses.replace(plan, target=target, time=None, memory=memory)
    assert (other.fits, other.examples_per_second) == (None, None)
    assert (other.mfu, other.hfu) == (None, None)
    assert "A step takes" not in str(other) and "left of" not in str(other)
    json.dumps(other.to_json())
