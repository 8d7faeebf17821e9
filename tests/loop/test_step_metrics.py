import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from loop_helpers import Recorder, make_loader, run

import eqxshard
from eqxshard.data._order import Steps
from eqxshard.loop._clock import Clock
from eqxshard.loop._step_metrics import Report
from eqxshard.trackers._metrics import numbers
from eqxshard.training import Metrics


def metrics(loss, weight=1.0, nonfinite=0):
    return Metrics(
        {"loss": jnp.float32(loss * weight)}, jnp.float32(weight), jnp.int32(nonfinite)
    )


def report_to(*trackers):
    return Report(trackers, Clock(), Steps(1, 4))


def test_a_report_has_the_means_since_the_last_one():
    recorder = Recorder()
    report = report_to(recorder)
    report.add(1, metrics(1.0), 1, due=False)
    report.flush()
    assert recorder.lines == []
    report.add(2, metrics(4.0, weight=3.0), 1, due=True)
    report.read()
    report.add_evaluation({"accuracy": 0.5, "confusion": np.eye(2)})
    report.flush()
    ((step, values),) = recorder.lines
    assert (step, values["epoch"], values["eval/accuracy"]) == (2, 0.5, 0.5)
    assert values["train/loss"] == pytest.approx(13 / 4)
    examples = values["train/examples_per_second"] * values["train/seconds"]
    assert examples == pytest.approx(4)
    # Arrays are for callbacks, and not for trackers.
    assert report.values["eval/confusion"].shape == (2, 2)
    assert values.keys() == report.values.keys() - {"eval/confusion"}
    report.flush()
    assert len(recorder.lines) == 1


def test_the_speed_is_without_the_call_that_compiled():
    recorder, clock = Recorder(), Clock()
    report = Report([recorder], clock, Steps(1, 4))
    # Pretend that compiling took an hour.
    clock.totals["compile"] = 3600.0
    report._training_since -= 3600.0
    for step in (1, 2, 3):
        report.add(step, metrics(1.0, weight=10.0), 1, due=step == 3)
    report.flush()
    ((_, values),) = recorder.lines
    assert values["train/seconds"] > 3600
    speed = values["train/examples_per_second"]
    assert speed * (values["train/seconds"] - 3600) == pytest.approx(20)


def test_images_are_for_trackers_but_no_metrics():
    recorder = Recorder()
    report = report_to(recorder)
    images = [eqxshard.trackers.Image(np.zeros((2, 2))) for _ in range(2)]
    report.add(1, metrics(1.0), 1, due=True)
    report.read()
    report.add_evaluation({"samples": images[0]})
    report.log(1, {"filters": images[1]})
    report.flush()
    ((_, values),) = recorder.lines
    assert [values["eval/samples"], values["filters"]] == images
    assert not {"eval/samples", "filters"} & numbers(values).keys()
    report.log(2, {"name": "LeNet"})
    with pytest.raises(TypeError, match="name was logged as a str; log numbers, or make"):
        report.flush()


def test_steps_in_a_row_that_are_not_finite_are_counted_across_reports():
    report = report_to()
    for step, bad in enumerate([1, 0, 1, 1, 1], start=1):
        report.add(step, metrics(1.0, nonfinite=bad), 1, due=True)
        report.flush()
    assert report.nonfinite_steps == [3, 4, 5]


def test_only_the_steps_that_were_taken_are_read():
    recorder = Recorder()
    report = report_to(recorder)
    room = Metrics(
        {"loss": np.array([1, 2, 99], np.float32)}, np.ones(3, np.float32), np.zeros(3, int)
    )
    report.add(2, room, 2, due=True)
    report.flush()
    assert recorder.lines[0][1]["train/loss"] == 1.5


def test_an_evaluation_must_return_metrics(unannotated):
    forgets: Any = lambda model: None  # noqa: E731
    with pytest.raises(TypeError, match="evaluate returned a NoneType; return a dict"):
        run(None, make_loader(), steps=1, evaluate=forgets)


def test_a_run_continues_if_its_logs_cannot_be_written(small_disk, caplog):
    tracker = eqxshard.trackers.JSONLines(small_disk / "metrics.jsonl")
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))
    run(None, make_loader(), epochs=3, log_every=1, trackers=[tracker])
    assert "a tracker failed: [Errno 28] No space left on device. Tra" in caplog.text
