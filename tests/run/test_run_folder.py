import importlib.util
import itertools
import json
import sys
import types

import pytest

import eqxshard
from eqxshard.run import RunFolder
from eqxshard.run._config import Resume
from eqxshard.run._paths import RunPaths, default_folder
from eqxshard.run._result import read_summary
from eqxshard.run._run_folder import _PageTracker
from eqxshard.trackers import Curves, JSONLines, ProgressBar, TensorBoard


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def start(folder, first=0):
    """The trackers of a run, which take the next two steps."""
    trackers = folder.trackers(
        title="small", total_steps=4, first=first, extra={"data": "lines"}
    )
    for tracker in trackers:
        for step in (first + 1, first + 2):
            tracker.log(step, {"epoch": step / 2, "train/loss": 1.0 / step})
        tracker.close()
    return trackers


def test_trackers_write_what_they_are_named_for(folder):
    kinds = [JSONLines, Curves, _PageTracker, ProgressBar]
    kinds[2:2] = [TensorBoard] if importlib.util.find_spec("tensorboard") else []
    assert [*map(type, start(folder))] == kinds
    assert folder.history() == [
        {"step": 1, "epoch": 0.5, "train/loss": 1.0, "data": "lines"},
        {"step": 2, "epoch": 1.0, "train/loss": 0.5, "data": "lines"},
    ]
    assert folder.page.read_text().startswith("<!doctype html>")
    assert {*folder.files}.issuperset(x for x in folder.path.iterdir() if x.is_file())


def test_a_run_that_begins_anew_hides_the_events_of_the_earlier_one(folder):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    start(folder)
    # TensorBoard reads files by name, and those of the same second in no useful order.
    (first,) = (folder.path / "tensorboard").iterdir()
    first.rename(first.with_name("events.out.tfevents.0000000001.first"))
    (log, *others) = folder.trackers(title="small", total_steps=4)
    for tracker in others:
        tracker.log(1, {"epoch": 0.5, "train/loss": 7.0})
        tracker.close()
    log.close()
    found = events.EventAccumulator(str(folder.path / "tensorboard"))
    found.Reload()
    assert [(x.step, x.value) for x in found.Scalars("train/loss")] == [(1, 7.0)]


def test_the_page_is_written_after_evaluations_but_seldom(folder, monkeypatch):
    now, written = [1000.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def write(self):
        written.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr(RunFolder, "write_page", write)
    tracker = _PageTracker(folder)
    for step in range(1, 1000):
        now[0] += 1.0
        tracker.log(step, {"eval/loss": 1.0} if step % 2 else {"train/loss": 1.0})
    tracker.close()
    # Each takes two seconds, so the next is due 200 later.
    between = [round(b - a) for a, b in itertools.pairwise(written[:-1])]
    assert between == [202] * len(between) and len(between) == 4


def test_the_default_folder_is_named_after_the_script(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    monkeypatch.setattr(sys, "argv", ["/recipes/fashion_mnist.py", "--seed", "1"])
    assert default_folder("LeNet 5") == "runs/fashion_mnist-lenet-5"
    assert default_folder(None) == "runs/fashion_mnist"
    # Like a notebook, and `python -c`.
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    for argv in ([""], ["-c"], ["/lib/ipykernel_launcher.py", "-f", "kernel.json"]):
        monkeypatch.setattr(sys, "argv", argv)
        assert default_folder("LeNet") == "runs/lenet"
        assert default_folder(None) == "runs/run"


@pytest.mark.parametrize("resume", ["no", "auto"])
@pytest.mark.parametrize("name", [file.name for file in RunPaths("run").files])
def test_files_of_the_users_are_not_replaced(folder, name, resume: Resume):
    """Such as the page of a site, in the folder that somebody gives a run."""
    folder.path.mkdir()
    checkpointer = eqxshard.Checkpointer(folder.checkpoints)
    (folder.path / "notes.txt").touch()
    assert not folder.should_resume(resume, checkpointer)
    (folder.path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"run/{name} is not of a run of eqxshard, and"):
        folder.should_resume(resume, checkpointer)
    # A run that was stopped before its first checkpoint has claimed the folder, at least.
    checkpointer.claim_run(0, None)
    checkpointer.close()
    assert not folder.should_resume(resume, checkpointer)
    (folder.path / name).rename(folder.path / "elsewhere")
    (folder.path / name).symlink_to("elsewhere")
    with pytest.raises(ValueError, match=f"run/{name} is not of a run of eqxshard, and"):
        folder.should_resume(resume, checkpointer)


@pytest.mark.parametrize(
    "odd",
    [
        {"test_loss": "low"},
        {"test_loss": [1]},
        {"points_per_second": {}},
        {"seconds_per_epoch": 10**400},
    ],
)
def test_a_summary_of_the_wrong_form_is_none(folder, odd):
    good = {
        "test_loss": None,
        "test_loss_by_evaluation": [1],
        "seconds_per_epoch": 2,
        "x": "y",
    }
    folder.path.mkdir()
    folder.summary.write_text(json.dumps(good))
    assert read_summary(folder) == good
    for text in (json.dumps(good | odd), "[]", "5", "{"):
        folder.summary.write_text(text)
        assert read_summary(folder) == {}
