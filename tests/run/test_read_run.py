import json

import pytest
from hostile_files import forbid
from run_page_helpers import make_lines, make_record, make_run

from eqxshard.checkpoint._checksums import write_checksums
from eqxshard.checkpoint._description import describe
from eqxshard.run import RunFolder
from eqxshard.run._page import save_page
from eqxshard.run._read_run import read_run


def test_the_pace_is_the_median_without_what_compiles(tmp_path):
    lines = make_lines(2)
    lines[0]["train/seconds"] = 60.0
    lines[0]["train/examples_per_second"] = 1.0
    run = read_run(make_run(tmp_path / "run", lines=lines))
    assert run.step_seconds == pytest.approx(0.13)
    assert run.examples_per_second == pytest.approx(64 * 50 / 6.5)
    alone = read_run(make_run(tmp_path / "one", lines=lines[:1]))
    assert alone.step_seconds == pytest.approx(60 / 50)


def test_a_log_without_times_has_none(tmp_path):
    lines = [{"step": 5, "train/loss": 1.0}, {"step": 9, "train/loss": None}]
    run = read_run(make_run(tmp_path / "run", lines=lines))
    assert (run.step_seconds, run.examples_per_second, run.goodput) == (None, None, None)
    assert run.parts == {} and run.last("train/loss") == 1.0 and run.last("x") is None
    assert run.reports[1].values["train/loss"] != run.reports[1].values["train/loss"]


@pytest.mark.parametrize(
    "steps, ended, headline, state",
    [
        (2000, None, "Finished after 2,000 steps", "finished"),
        (2000, {"why": "OSError"}, "Stopped at step 2,000 of 2,000: OSError", "stopped"),
        (3000, {"why": ""}, "Stopped at step 2,000 of 3,000", "stopped"),
        (3000, {"why": "KeyError: 3"}, "of 3,000: KeyError: 3", "stopped"),
        (3000, None, ", and not ended since", "not ended"),
    ],
)
def test_how_far_a_run_is(tmp_path, steps, ended, headline, state):
    record = make_record(steps=steps, ended=ended)
    run = read_run(make_run(tmp_path / "run", record=record))
    assert run.headline.endswith(headline) and run.state == state


def test_damaged_files_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run", record=make_record(), plan={"a": 1})
    for file in (folder.record, folder.path / "plan.json"):
        file.write_text('{"half')
    folder.warnings.write_text('{"text": "whole"}\n[1]\n{"te')
    with folder.metrics.open("a") as file:
        file.write('{"no step": 1}\n{"step": 20')
    run = read_run(folder)
    assert (run.record, run.plan, run.warnings) == ({}, None, [{"text": "whole"}])
    assert run.step == 2000


def test_checkpoints_have_their_size_and_metrics(tmp_path):
    folder = make_run(tmp_path / "run")
    for step in (4, 8):
        path = folder.checkpoints / str(step)
        path.mkdir(parents=True)
        (path / "weights").write_bytes(b"x" * 1000)
        known = {"eval/loss": 0.5} if step == 8 else {}
        text = json.dumps(describe(step, {}, None, known, {}))
        (path / "description.json").write_text(text if step == 8 else "{")
        write_checksums(path)
    first, second = read_run(folder).checkpoints
    assert (first.step, second.step, first.metrics) == (4, 8, {})
    assert second.metrics == {"eval/loss": 0.5} and second.nbytes > 1000


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*none; give the folder"):
        read_run(RunFolder(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; give one such as"):
        read_run(RunFolder(tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_files_that_never_end_are_not_read(tmp_path, kind):
    folder = make_run(tmp_path / "run", record=make_record(), plan={"a": 1})
    for file in (folder.record, folder.path / "plan.json", folder.summary):
        file.unlink(missing_ok=True)
        forbid(file, kind)
    run = read_run(folder)
    assert (run.record, run.plan, run.step) == ({}, None, 2000)
    folder.metrics.unlink()
    forbid(folder.metrics, kind)
    with pytest.raises(ValueError, match=r"metrics\.jsonl' is not a regular file"):
        read_run(folder)


def test_a_line_that_never_ends_is_refused(tmp_path):
    folder = make_run(tmp_path / "run")
    with folder.metrics.open("ab") as file:
        file.truncate(2**42)
    with pytest.raises(ValueError, match=r"metrics\.jsonl' has a line of .*; it is d"):
        read_run(folder)


@pytest.mark.parametrize(
    "forged",
    [
        {"ended": [1]},
        {"starts": [{}]},
        {"devices": {"kind": 1}},
        {"devices": {"kind": "x", "count": 8, "per_process": 0}},
        {"memory": {"peak": "x"}},
        {"settings": [1]},
        {"title": {"a": 1}},
    ],
    ids=json.dumps,
)
def test_a_record_that_makes_no_sense_is_a_sentence(tmp_path, forged):
    folder = make_run(tmp_path / "run", record=make_record(**forged))
    says = rf"what the files of {tmp_path}/run say cannot be shown "
    with pytest.raises(ValueError, match=says) as error:
        save_page(folder)
    assert str(error.value).endswith("); they are damaged, or of another version.")


def test_a_number_that_is_too_large_is_a_sentence(tmp_path):
    line = {"step": 1, "train/loss": 10**400}
    folder = make_run(tmp_path / "run", lines=[line])
    with pytest.raises(ValueError, match="run say cannot be shown"):
        save_page(folder)
