"""`train` in the folder of a run that was stopped, or of another one."""

import dataclasses
import json
from functools import partial

import equinox as eqx
import jax
import pytest
from helpers import assert_equal
from page_parser import parse
from run_helpers import files, measured, read_lines
from run_script import EXAMPLES, Line, make_data
from run_train_helpers import (
    CONFIG,
    STEPS,
    copy,
    finished,
    make_sgd,
    refusal,
    saved_steps,
    train,
)

import eqxshard
from eqxshard.pages._format import format_number, format_value
from eqxshard.run import RunFolder
from eqxshard.run._changes import changes
from eqxshard.run._recorded_run import read_run

_ = copy, finished  # Fixtures.


def assert_ended_as(folder, finished):
    """The same numbers, each step's once, and the same weights, bit for bit."""
    assert measured(folder) == measured(finished.folder)
    like = eqx.filter_eval_shape(partial(Line, 8), jax.random.key(0))
    checkpointer = eqxshard.Checkpointer(folder / "checkpoints")
    assert checkpointer.steps()[-1] == STEPS
    assert_equal(checkpointer.restore_model(like), jax.device_get(finished.state.model))
    assert (folder / "summary.json").exists()


class Killed(BaseException):
    """As sudden as SIGKILL, for a test in this process."""


class Dies:
    def log(self, step, values):
        if step == 10:
            raise Killed

    def close(self, error=None):
        pass


def resume(how):
    return dataclasses.replace(CONFIG, resume=how)


def test_a_run_that_stopped_early_has_ended(tmp_path, capsys):
    def start(patience, how):
        stop = eqxshard.callbacks.EarlyStopping("eval/loss", patience, mode="max")
        config = dataclasses.replace(resume(how), evaluate_every=2)
        return train(tmp_path, config, callbacks=[stop])

    first = start(1, "no")
    assert int(first.state.step) == 4
    page = parse((tmp_path / "index.html").read_text())
    assert page.find("h1").text.startswith("Stopped at step 4 of 12: eval/loss has not imp")
    before = files(tmp_path)
    capsys.readouterr()
    again = start(1, "auto")
    out, err = capsys.readouterr()
    assert "the run has ended at step 4: eval/loss had not improved" in err
    assert "resuming" not in out
    assert int(again.state.step) == 4 and again.summary == first.summary
    after = files(tmp_path)
    assert {path: after.get(path) for path in before} == before
    # More patience, and it goes on.
    assert int(start(9, "yes").state.step) == STEPS


def test_a_run_starts_over_and_leaves_the_files_of_others(finished, copy, capsys):
    mine = copy / "checkpoints" / "notes" / "thesis.csv"
    mine.parent.mkdir()
    mine.write_text("1")
    (copy / "plan.json").write_text("{}")
    before = files(copy)
    config = dataclasses.replace(CONFIG, overwrite=True)
    # Nothing of the earlier run is lost to a mistake.
    assert "'eval/loss'" in refusal(copy, config, best="eval/los")
    assert files(copy) == before
    # The same if a checkpoint has to stay because it is in an archive.
    step, archive = (
        copy / "checkpoints" / str(saved_steps(copy)[0]),
        copy.parent / "archive",
    )
    step.rename(archive)
    step.symlink_to(archive)
    assert "is not removed; move it away" in refusal(copy, config)
    assert len(saved_steps(copy)) == len(saved_steps(finished.folder))
    step.unlink()
    archive.rename(step)
    run = train(copy, config)
    assert_ended_as(copy, finished)
    assert saved_steps(copy) == saved_steps(finished.folder)
    assert int(run.state.step) == STEPS and mine.read_text() == "1"
    assert (copy / "plan.json").read_text() == "{}"
    assert [start.step for start in read_run(RunFolder(copy)).starts] == [0]
    # A folder without a run is nothing to refuse.
    assert int(train(copy.parent / "new", config).state.step) == STEPS
    for how in ("yes", "auto"):
        both = dataclasses.replace(config, resume=how)
        said = f"--overwrite starts over and --resume {how} continues a run; give one"
        assert said in refusal(copy, both)


@pytest.mark.slow
def test_a_run_that_died_resumes_as_if_it_had_not(finished, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("eqxshard.loop._ends._keep_state", lambda *error: None)
        train(tmp_path, trackers=(Dies(),))
    # Its last steps are not saved.
    assert saved_steps(tmp_path)[-1] == 8
    run = train(tmp_path, resume("yes"))
    assert "resuming from step 8." in capsys.readouterr().out.splitlines()
    assert_ended_as(tmp_path, finished)
    assert run.metrics == finished.metrics


def test_a_damaged_checkpoint_is_skipped(copy, finished, caplog, capsys):
    (copy / "checkpoints" / str(STEPS) / "description.json").write_text("{")
    train(copy, resume("yes"))
    assert f"the checkpoint of step {STEPS} in" in caplog.text
    assert "resuming from step 8." in capsys.readouterr().out.splitlines()
    assert_ended_as(copy, finished)


@pytest.mark.parametrize(
    "how, options, message",
    [
        ("no", {}, "at step 12; use --resume auto to continue it, --overwrite to remove"),
        ("yes", {"width": 4}, "float32[8,3] there, not float32[4,3]"),
        ("yes", {"make_optim": make_sgd}, "opt_state.0.mu.hidden.bias float32[8] is only"),
        ("yes", {"train_data": make_data(EXAMPLES - 1, 0)}, "length was 96 and is 95"),
        ("auto", {"epochs": 1}, None),
    ],
    ids=["second run", "model", "optimizer", "data", "finished"],
)
def test_another_run_in_the_same_folder_is_refused(copy, how, options, message):
    before = files(copy)
    if message is None:
        train(copy, resume(how), **options)
        return
    assert message in refusal(copy, resume(how), **options)
    assert files(copy) == before


def test_resuming_says_what_changed(copy, capsys):
    record = copy / "run.json"
    record.write_text(record.read_text().replace('"numpy": "', '"numpy": "0'))
    config = dataclasses.replace(resume("yes"), devices=4, log_every=3)
    train(copy, config, epochs=3, settings={"rate": 0.1})
    line, *_ = capsys.readouterr().out.splitlines()
    said, _, changes = line.partition("; changed: ")
    assert said == "resuming from step 12"
    found = {*changes.removesuffix(".").split(", ")}
    numpy = {change for change in found if change.startswith("numpy 0")}
    assert len(numpy) == 1 and found - numpy == {
        "devices 2 x cpu -> 4 x cpu",
        "mesh data=2 -> data=4",
        "log_every 2 -> 3",
        "epochs 2 -> 3",
        "rate none -> 0.1",
    }


def test_steps_in_place_of_epochs_are_one_change():
    before = {"steps": 64, "settings": {"epochs": 2.0}}
    now = {"steps": 50, "settings": {"epochs": 1.5625, "steps": 50}}
    assert changes(before, now) == ["steps 64 -> 50"]


def test_a_resumed_run_says_the_same_everywhere(copy, capsys):
    """It resumes on other devices; terminal, log, page and summary agree."""
    config = dataclasses.replace(resume("yes"), devices=4)
    result = train(copy, config, epochs=3, best="eval/loss", mode="min")
    _, err = capsys.readouterr()
    run = read_run(RunFolder(copy))
    now, best = run.last_start, run.best
    assert now.examples_per_second is not None and best is not None
    assert [start.step for start in run.starts] == [0, 12]
    assert [start.facts["mesh"] for start in run.starts] == [{"data": 2}, {"data": 4}]
    assert now.goodput == pytest.approx(read_lines(copy)[-1]["goodput"])
    goodput, speed = f"{now.goodput:.0%}", format_number(now.examples_per_second)
    assert f"goodput {goodput[:-1]} % of " in err
    assert (result.summary["goodput"], result.summary["points_per_second"]) == (
        now.goodput,
        now.examples_per_second,
    )
    assert result.speed.endswith(f" | {speed} points/s")
    page = parse((copy / "index.html").read_text())
    tiles = {box.find("dt").text: box.find("dd") for box in page.find("dl").find_all("div")}
    assert tiles["Goodput"].text.startswith(goodput)
    assert tiles["Points per second"].text.startswith(speed)
    changed = page.find("section", id="starts").find("tbody").find_all("td")[-1].text
    assert "mesh data=2 -> data=4" in changed and "devices 2 x cpu -> 4 x cpu" in changed
    # The best is beside the last.
    value, step = best
    assert f" | best loss {format_value(value)} at step {step} | " in str(result)


def test_a_finished_run_that_is_started_again_has_its_own_mesh(copy, finished):
    again = train(copy, dataclasses.replace(resume("auto"), devices=4))
    assert (again.title, again.speed) == (finished.title, finished.speed)


def test_a_warning_of_the_data_is_listed_once(copy, finished):
    for epochs in (3, 4):
        data = make_data(EXAMPLES, 0)
        data.warning = "Half of the labels are guesses."
        result = train(copy, resume("auto"), epochs=epochs, train_data=data)
    lines = (copy / "warnings.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert texts.count(data.warning) == 1
    assert result.title == finished.title
