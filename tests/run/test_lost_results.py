"""Whatever happens to the folder of a run, its results are there, or it says so."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from typing import Any

import jax
import pytest
from helpers import assert_equal
from process_helpers import read_until, started
from run_helpers import SCRIPT, environment, files, measured, read_lines
from run_train_helpers import (
    CONFIG,
    STEPS,
    copy,
    finished,
    make_optim,
    refusal,
    saved_steps,
    train,
)

from eqxshard.callbacks import Every
from eqxshard.trackers import JSONLines

_ = copy, finished  # Fixtures.

LONG = ["--epochs", 100_000, "--seconds-per-step", 0.02, "--devices", 2]


def full(*args, **options):
    raise OSError(28, "No space left on device")


def resume(how):
    return dataclasses.replace(CONFIG, resume=how)


def assert_same_result(run, finished):
    assert run.metrics == finished.metrics
    assert_equal(run.state, jax.device_get(finished.state))


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_keeps_the_result(
    tmp_path, finished, monkeypatch, caplog
):
    monkeypatch.setattr("eqxshard.run._run_folder.write_whole", full)
    run = train(tmp_path)
    assert_same_result(run, finished)
    assert "summary.json cannot be written: [Errno 28] No space left" in caplog.text
    assert run.summary["test_loss"] == finished.summary["test_loss"]


@pytest.mark.slow
def test_a_disk_without_room_for_metrics_keeps_the_result(tmp_path, finished, monkeypatch):
    monkeypatch.setattr(JSONLines, "_write", full)
    run = train(tmp_path)
    assert read_lines(tmp_path) == []
    assert_same_result(run, finished)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["evaluated_at"] == STEPS
    name = "test_loss_by_evaluation"
    assert summary[name] == finished.summary[name]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["renamed", "deleted"])
def test_a_folder_that_goes_in_the_middle_is_written_again(tmp_path, finished, how, caplog):
    folder = tmp_path / "run"

    def go(loop):
        if loop.step == 7:
            folder.rename(tmp_path / "other")
            if how == "deleted":
                shutil.rmtree(tmp_path / "other")

    run = train(folder, callbacks=[Every(1, go)])
    assert_same_result(run, finished)
    assert measured(folder) == measured(finished.folder)
    assert saved_steps(folder)[-1] == STEPS
    for name in ("metrics.jsonl", "checkpoints"):
        assert f"{folder / name} is gone" in caplog.text
    assert (folder / "index.html").exists() and (folder / "run.json").exists()


@pytest.mark.slow
def test_a_folder_stays_where_it_is_if_the_script_goes_elsewhere(
    tmp_path, finished, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()

    def leave_first(steps):
        os.chdir(tmp_path / "elsewhere")
        return make_optim(steps)

    leave = Every(5, lambda loop: os.chdir(tmp_path / "elsewhere"))
    ways: list[Any] = [{"callbacks": [leave]}, {"make_optim": leave_first}]
    for options in ways:
        monkeypatch.chdir(tmp_path)
        shutil.rmtree("run", ignore_errors=True)
        run = train("run", **options)
        assert run.folder == tmp_path / "run"
        assert measured(tmp_path / "run") == measured(finished.folder)
        assert saved_steps(tmp_path / "run")[-1] == STEPS
        assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_what_a_finished_run_has_written_stays_as_it_is(copy, monkeypatch):
    before = files(copy)
    # Files are replaced and not removed, so there is no moment without one.
    monkeypatch.setattr("pathlib.Path.unlink", full)
    train(copy, resume("auto"))
    after = files(copy)
    assert after.keys() == before.keys()
    changed = {path.name for path in after if after[path] != before[path]}
    assert changed == set()


def test_a_folder_of_checkpoints_is_not_one_of_a_run(copy):
    before = files(copy)
    says = refusal(copy / "checkpoints", resume("auto"))
    remedy = f"not of a run; give the run's, such as {copy}."
    assert says.endswith(f"is a folder of checkpoints, {remedy}")
    assert files(copy) == before


@pytest.mark.slow
def test_what_others_wrote_among_the_metrics_does_not_cost_the_result(copy, finished):
    lines = read_lines(copy)
    shutil.rmtree(copy / "checkpoints" / str(STEPS))
    strange = [{"step": 3}, {"step": 3, "epoch": "x"}, {"note": "mine"}]
    strange += [{"step": 3, "epoch": 0.5, "seconds/data": "long"}]
    # Too large for a float, which used to be found after training.
    strange += [{"step": 3, name: 10**400} for name in ("train/loss", "train/seconds")]
    with (copy / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in strange)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"starts": 7}))
    run = train(copy, resume("yes"))
    assert_same_result(run, finished)
    assert len(read_lines(copy)) == len(lines) + 3
    assert [x["step"] for x in json.loads((copy / "run.json").read_text())["starts"]] == [8]
    # A finished run, whose summary is written again.
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"seconds_per_epoch": "x"}))
    assert_same_result(train(copy, resume("yes")), finished)
    assert_same_result(train(copy, resume("yes")), finished)


@pytest.mark.slow
def test_of_two_runs_that_start_at_once_one_is_refused(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, SCRIPT, *LONG, "--output", folder, "--resume=auto"]
    options: dict[str, Any] = {"env": environment()}
    with started(command, **options) as one, started(command, **options) as two:
        while one.poll() is None and two.poll() is None:
            time.sleep(0.1)
        refused, other = (two, one) if one.poll() is None else (one, two)
        out, err = refused.communicate()
        assert (refused.returncode, out) == (2, "")
        says = f"error: {folder / 'checkpoints'} is in use by process {other.pid} on "
        assert err.splitlines()[-1].startswith(says)
        read_until(other, other.stderr, "step 6/")
        other.send_signal(signal.SIGTERM)
        other.communicate(timeout=120)
        assert other.returncode == 143
    steps = [line["step"] for line in read_lines(folder)]
    assert steps == sorted({*steps}) and saved_steps(folder)[-1] == steps[-1]
