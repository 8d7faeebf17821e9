import dataclasses

import pytest
from run_page_helpers import make_plan, make_record, make_run

import eqxshard
from eqxshard.run._read_run import read_run
from eqxshard.run._versus_plan import compare_with_plan


@pytest.fixture
def compare(tmp_path):
    """The rows of a comparison, by their names."""

    def call(record, **changes):
        run = read_run(make_run(tmp_path / "run", record=record))
        found = compare_with_plan(make_plan(**changes), run)
        return {name: cells for name, *cells in found}

    return call


def test_what_was_measured_is_beside_what_was_planned(compare):
    assert compare(make_record()) == {
        "devices": ["8 x NVIDIA H200", "8 x NVIDIA H200", ""],
        "mesh": ["data=2, fsdp=4", "data=2, fsdp=4", ""],
        "batch size": ["64", "64", ""],
        "time of a step": ["0.1 s", "0.13 s", "1.3"],
        "examples per second": ["640", "492.3", "0.769"],
        "of the devices' peak": ["80.0%", "61.5%", "0.769"],
        "memory of a device": ["58.00 GB", "61.00 GB", "1.05"],
    }


def test_what_is_not_known_is_said(compare):
    found = compare(make_record(memory=None), time=None, mfu=None)
    assert found["time of a step"] == ["unknown", "0.13 s", ""]
    assert found["memory of a device"] == ["58.00 GB", "unknown", ""]


def test_the_plan_of_this_version_is_understood():
    """What it reads is what a plan writes."""
    names = {field.name for field in dataclasses.fields(eqxshard.Plan)}
    names |= {"examples_per_second", "mfu"}
    assert make_plan().keys() <= names
    assert {"peak"} <= {x.name for x in dataclasses.fields(eqxshard.PlannedMemory)}
    assert {"step"} <= {x.name for x in dataclasses.fields(eqxshard.PlannedTime)}
