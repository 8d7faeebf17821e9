import json
import math
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxshard
from eqxshard.trackers import Image, JSONLines


def lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_each_line_is_in_the_file_when_log_returns(tmp_path):
    path = tmp_path / "new" / "folders" / "metrics.jsonl"
    tracker = JSONLines(path)
    assert isinstance(tracker, eqxshard.trackers.Tracker)
    assert lines(path) == []
    tracker.log(1, {"epoch": 0.5, "train/loss": 2.0})
    assert lines(path) == [{"step": 1, "epoch": 0.5, "train/loss": 2.0}]
    tracker.log(2, {"epoch": 1.0, "eval/accuracy": 0.25})
    assert lines(path)[1:] == [{"step": 2, "epoch": 1.0, "eval/accuracy": 0.25}]
    tracker.close()


names = st.text(min_size=1).filter(lambda name: name != "step")


@given(values=st.dictionaries(names, st.floats()))
def test_values_round_trip(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("jsonl") / "metrics.jsonl"
    tracker = JSONLines(path)
    tracker.log(7, values)
    tracker.close()
    expected = {k: v if math.isfinite(v) else None for k, v in values.items()}
    assert lines(path) == [{"step": 7, **expected}]


def test_numpys_numbers_are_written_and_pictures_are_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JSONLines(path)
    image = Image(np.zeros((2, 2)))
    tracker.log(1, {"loss": np.float64("nan"), "lr": np.float64(0.5), "samples": image})
    tracker.close()
    assert lines(path) == [{"step": 1, "loss": None, "lr": 0.5}]


def test_extra_is_in_every_line_unless_it_is_logged(tmp_path):
    extra = {"data": "synthetic", "mesh": {"data": 8}, "train/loss": "x"}
    tracker = JSONLines(tmp_path / "m.jsonl", extra=extra)
    extra["data"] = "changed later"
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    (line,) = lines(tmp_path / "m.jsonl")
    expected = {"step": 1, "train/loss": 1.0, "data": "synthetic", "mesh": {"data": 8}}
    assert list(line.items()) == list(expected.items())


@pytest.mark.parametrize("until, steps", [(None, [9]), (2, [1, 2, 9]), (0, [9])])
def test_a_resumed_run_keeps_the_lines_before_it(tmp_path, until, steps):
    tracker = JSONLines(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    # The incomplete last line of a killed run.
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"step": 2, "train/lo')
    tracker = JSONLines(tmp_path / "m.jsonl", keep_until=until)
    tracker.log(9, {"train/loss": 1.0})
    tracker.close()
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == steps


def test_closing_twice_is_harmless_but_logging_afterwards_is_an_error(tmp_path):
    tracker = JSONLines(tmp_path / "m.jsonl")
    tracker.close()
    tracker.close()
    with pytest.raises(
        ValueError, match=r"m\.jsonl' is closed; continue with .*keep_until=0"
    ):
        tracker.log(1, {"train/loss": 1.0})


def test_a_path_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").touch()
    says = {
        tmp_path: f"cannot write '{tmp_path}': .*; use a path",
        tmp_path / "file" / "m.jsonl": "/file' is a file and not a folder; use",
        tmp_path / "file" / "new" / "m.jsonl": "/file' is a file and not a folder; use",
        Path("gs://bucket/m.jsonl"): "is a URL; give a path on this machine",
    }
    for path, message in says.items():
        with pytest.raises(ValueError, match=message):
            JSONLines(path)


def test_the_file_stays_where_it_is_if_the_program_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = JSONLines("run/m.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert lines(tmp_path / "run" / "m.jsonl") == [{"step": 1, "train/loss": 1.0}]


@pytest.mark.parametrize("how", ["deleted", "renamed", "deleted after the last line"])
def test_a_file_that_is_gone_is_written_again(tmp_path, how, caplog):
    folder = tmp_path / "run"
    tracker = JSONLines(folder / "m.jsonl")
    last = 3 if how.endswith("line") else 2
    for step in range(1, last + 1):
        tracker.log(step, {"train/loss": 1.0})
    folder.rename(tmp_path / "other")
    if how != "renamed":
        shutil.rmtree(tmp_path / "other")
    for step in range(last + 1, 4):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    assert [line["step"] for line in lines(folder / "m.jsonl")] == [1, 2, 3]
    assert caplog.text.count("m.jsonl is gone: it was deleted, renamed or unmounted") == 1


def test_lines_wait_for_room_on_a_full_disk(tmp_path):
    """The limit of a file's size stands for a full disk: it, too, takes half a line."""
    path = tmp_path / "m.jsonl"
    tracker = JSONLines(path)
    tracker.log(1, {"train/loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tracker.log(2, {"train/loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert [line["step"] for line in lines(path)] == [1]
    assert [json.loads(line)["step"] for line in tracker.waiting] == [2]
    tracker.close()
    assert [line["step"] for line in lines(path)] == [1, 2]


def test_only_so_many_lines_wait(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("eqxshard.trackers._jsonl._MOST_WAITING", 3)
    tracker = JSONLines(tmp_path / "m.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(JSONLines, "_write", lambda self: None)
        for step in range(1, 8):
            tracker.log(step, {"train/loss": 1.0})
    assert len(tracker.waiting) == 3
    (record,) = caplog.records
    assert "3 lines wait for it; lines of later steps are dropped" in record.getMessage()
    tracker.close()
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2, 3]
