"""Locks of plans that are made by hand."""

import dataclasses

import jax
import pytest
from plan_helpers import made_by_hand

from eqxshard import testing

GATHER = testing.Collective(
    kind="all-gather",
    axes=("fsdp",),
    shapes=("f32[16,8]",),
    bytes=512,
    sent=384,
    times=4,
    in_loop=True,
    line="model.py:12",
    function="MLP.__call__",
    leaves=("up", "down"),
    hidden=0.5,
)
REDUCE = dataclasses.replace(
    GATHER, kind="all-reduce", axes=("data", "fsdp"), sent=7, times=1, in_loop=False
)


def make_plan(*collectives):
    memory = 1, 1, 1, 1, 1, 1, 7, None
    return made_by_hand(memory, collectives, mesh={"data": 2, "fsdp": 4})


PLAN = make_plan(GATHER, dataclasses.replace(REDUCE, leaves=(), line=None, function=None))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("EQXSHARD_UPDATE_LOCKS", raising=False)
    testing.assert_plan_lock(tmp_path / "locks" / "plan.txt", PLAN)
    return tmp_path / "locks" / "plan.txt"


def changes(file, *collectives):
    with pytest.raises(AssertionError, match="run this test once with EQX") as error:
        testing.assert_plan_lock(file, make_plan(*collectives))
    lines = str(error.value).splitlines()
    assert lines[0] == f"{file} differs:"
    return [line.strip() for line in lines[1:-1]]


def test_the_text_of_a_lock(file):
    testing.assert_plan_lock(file, PLAN)
    assert file.read_text() == (
        "# What a planned step sends: how often in a step, and the bytes of each device "
        "each time.\n# Written by eqxshard.testing with jax "
        f"{jax.__version__}; write it again with EQXSHARD_UPDATE_LOCKS=1.\n"
        "backend: gpu\ndevices: 8 x NVIDIA H200 141GB HBM3e\nmesh: data=2 x fsdp=4\n"
        "data,fsdp all-reduce: 1 x 7 bytes\n"
        "fsdp all-gather of up, down in model.py MLP.__call__: 4 x 384 bytes in a loop\n"
    )


def test_changes_are_listed_from_what_to_what(file):
    reduce = PLAN.collectives[1]
    name = "fsdp all-gather of up, down in model.py MLP.__call__"
    outside = dataclasses.replace(GATHER, times=1, in_loop=False, sent=4 * 384)
    assert changes(file, outside, reduce) == [
        f"{name}: 4 x 384 bytes in a loop -> 1 x 1536 bytes"
    ]
    assert changes(file, GATHER, reduce, outside) == [
        f"{name}: 4 x 384 bytes in a loop -> 1 x 1536 bytes + 4 x 384 bytes in a loop"
    ]
    assert changes(file, GATHER, REDUCE) == [
        "+ data,fsdp all-reduce of up, down in model.py MLP.__call__: 1 x 7 bytes",
        "- data,fsdp all-reduce: 1 x 7 bytes",
    ]


def test_other_lines_and_schedules_change_nothing(file):
    halves = [
        dataclasses.replace(GATHER, sent=192, line=f"model.py:{n}", hidden=0.0)
        for n in (20, 30)
    ]
    testing.assert_plan_lock(file, make_plan(*halves, PLAN.collectives[1]))


def test_another_version_is_named_and_only_with_a_difference(file):
    text = file.read_text().replace(f"jax {jax.__version__}", "jax 0.9.1")
    file.write_text(text)
    testing.assert_plan_lock(file, PLAN)
    with pytest.raises(AssertionError, match=r"written with jax 0\.9\.1, and this is"):
        testing.assert_plan_lock(file, make_plan(GATHER))


def test_a_lock_is_written_on_request_and_not_in_ci(file, monkeypatch):
    other = file.with_name("other.txt")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match=r"other\.txt is missing, and CI does not"):
        testing.assert_plan_lock(other, PLAN)
    testing.assert_plan_lock(other, PLAN, update=True)
    assert other.read_text() == file.read_text()


def test_an_invalid_file_is_an_error(file):
    file.write_text(file.read_text() + "<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match="line 8 is not valid in a lock file: '<<<<"):
        testing.assert_plan_lock(file, PLAN)
