import json

import pytest
from hostile_files import forbid
from page_parser import parse, rows
from run_page_helpers import make_lines, make_record, make_run

from eqxshard.checkpoint._manifest import describe, write_checksums
from eqxshard.run import RunFolder
from eqxshard.run._page import save_page
from eqxshard.run._recorded_run import read_run
from eqxshard.run._result import summarize


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
    assert run.record == {} and run.step == 2000
    save_page(folder)
    section = parse(folder.page.read_text()).find("section", id="warnings")
    assert [item.text for item in section.find_all("li")] == ["None: whole"]


def test_checkpoints_have_their_size_and_metrics(tmp_path):
    folder = make_run(tmp_path / "run")
    for step in (2, 4, 8):
        path = folder.checkpoints / str(step)
        path.mkdir(parents=True)
        (path / "weights").write_bytes(b"x" * 1000)
        known = {"eval/loss": 0.5} if step == 8 else {}
        text = json.dumps(describe(step, {}, None, known, {}))
        (path / "description.json").write_text("{" if step == 4 else text)
        write_checksums(path)
    save_page(folder)
    # That of step 4 is damaged, and that of step 2 was saved before an evaluation.
    early, late = rows(parse(folder.page.read_text()), "checkpoints")
    assert [[cell.text for cell in cells][0::3] for cells in (early, late)] == [
        ["2", ""],
        ["8", "0.5000"],
    ]
    assert "kB" in late[1].text


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*none; give the folder"):
        read_run(RunFolder(tmp_path / "none"))
    (tmp_path / "train.py").touch()
    with pytest.raises(ValueError, match=r"train\.py is a file; give the folder of a run"):
        read_run(RunFolder(tmp_path / "train.py"))
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; give one such as"):
        read_run(RunFolder(tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_files_that_never_end_are_not_read(tmp_path, kind):
    folder = make_run(tmp_path / "run", record=make_record(), plan={"a": 1})
    for file in (folder.record, folder.path / "plan.json", folder.summary):
        file.unlink(missing_ok=True)
        forbid(file, kind)
    run = read_run(folder)
    assert (run.record, run.step) == ({}, 2000)
    save_page(folder)
    folder.metrics.unlink()
    forbid(folder.metrics, kind)
    with pytest.raises(ValueError, match=r"metrics\.jsonl' is not a regular file"):
        save_page(folder)


def test_a_line_that_never_ends_is_refused(tmp_path):
    folder = make_run(tmp_path / "run")
    with folder.metrics.open("ab") as file:
        file.truncate(2**42)
    with pytest.raises(ValueError, match=r"metrics\.jsonl' has a line of .*; it is d"):
        save_page(folder)


@pytest.mark.parametrize(
    "forged",
    [
        {"ended": [1]},
        {"devices": {"kind": "x", "count": 8, "per_process": 0}},
        {"settings": [1]},
    ],
    ids=json.dumps,
)
def test_a_record_that_makes_no_sense_is_a_sentence(tmp_path, forged):
    folder = make_run(tmp_path / "run", record=make_record(**forged))
    says = rf"the files of {tmp_path}/run cannot be shown "
    with pytest.raises(ValueError, match=says) as error:
        save_page(folder)
    assert "); correct or remove the one that is damaged or of ano" in str(error.value)


def test_the_pace_leaves_out_lines_between_reports(tmp_path):
    lines = [{"step": step, "learning_rate": 0.1} for step in range(1, 201)]
    for line in lines[49::50]:
        line |= {"train/seconds": 5.0, "train/loss": 1.0}
    run = read_run(make_run(tmp_path / "run", lines=lines, record=make_record()))
    assert run.last_start.step_seconds == pytest.approx(0.1)


def test_the_summary_is_of_the_evaluations_and_the_median_step(tmp_path):
    run = read_run(make_run(tmp_path / "run", lines=make_lines(8)))
    found = summarize(run, 200, "images")
    first, last = (lines["eval/accuracy"] for lines in make_lines(8)[3::4])
    assert found["test_accuracy_by_evaluation"] == [first, last]
    assert (found["test_accuracy"], found["evaluated_at"]) == (last, 400)
    # A report of 50 steps has 6.5 s of training.
    assert found["seconds_per_epoch"] == pytest.approx(4 * 6.5)
    assert found["images_per_second"] == pytest.approx(64 * 50 / 6.5)
    assert found["seconds"]["device"] == 8 * 6.0 and 0 < found["goodput"] < 1
    lines = [{"step": 1, "epoch": 1.0, "eval/loss": None}]
    found = summarize(read_run(make_run(tmp_path / "b", lines=lines)), 1, "images")
    assert found == dict.fromkeys(
        ("test_loss", "seconds_per_epoch", "images_per_second")
    ) | {"test_loss_by_evaluation": [None], "evaluated_at": 1}
