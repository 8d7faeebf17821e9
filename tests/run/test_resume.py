"""`train` in the folder of a run that was stopped, or of another one."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import pytest
from helpers import assert_equal
from run_helpers import files, measured
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
        ("no", {}, "at step 12; add config=RunConfig(resume='auto') to continue it, or"),
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
    *found, numpy = changes.removesuffix(".").split(", ")
    assert set(found) == {
        "devices 2 x cpu -> 4 x cpu",
        "mesh data=2 -> data=4",
        "log_every 2 -> 3",
        "epochs 2.0 -> 3.0",
    }
    assert numpy.startswith("numpy 0")
