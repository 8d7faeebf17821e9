import pytest
from run_page_helpers import make_plan, make_record, make_run

from eqxshard.run._read_run import read_run
from eqxshard.run._versus_plan import compare_with_plan


@pytest.fixture
def compare(tmp_path):
    def call(record, **changes):
        run = read_run(make_run(tmp_path / "run", record=record))
        return compare_with_plan(make_plan(**changes), run)

    return call


def test_what_was_measured_is_beside_what_was_planned(compare):
    found = compare(make_record())
    assert found.rows == (
        ("time of a step", "0.1 s", "0.13 s", "1.3"),
        ("examples per second", "640", "492.3", "0.769"),
        ("of the devices' peak", "80.0%", "61.5%", "0.769"),
        ("memory of a device", "58.00 GB", "61.00 GB", "1.05"),
    )
    assert found.differences == () and "bound by compute" in found.notes[0]


def test_a_plan_of_another_step_is_called_so(compare):
    record = make_record(
        mesh={}, batch_size=32, devices={"kind": "cpu", "count": 1, "per_process": 1}
    )
    assert compare(record).differences == (
        "The kind of device of the plan is NVIDIA H200, and that of the run cpu.",
        "The number of devices of the plan is 8, and that of the run 1.",
        "The mesh of the plan is data=2, fsdp=4, and that of the run one device.",
        "The batch size of the plan is 64, and that of the run 32.",
    )


def test_without_a_known_speed_there_is_only_memory(compare):
    found = compare(make_record(memory=None), time=None, mfu=None)
    assert found.rows == (
        ("memory of a device", "58.00 GB", "not told by these devices", ""),
    )
    assert found.notes[0].startswith("The plan has no time, because")


def test_the_plan_of_this_version_is_understood(tmp_path):
    """What it reads is what a plan writes."""
    import dataclasses

    import eqxshard

    names = {field.name for field in dataclasses.fields(eqxshard.Plan)}
    names |= {"examples_per_second", "mfu"}
    assert make_plan().keys() <= names
    assert {"peak"} <= {x.name for x in dataclasses.fields(eqxshard.PlannedMemory)}
    assert {"step"} <= {x.name for x in dataclasses.fields(eqxshard.PlannedTime)}
