"""Runs of MLflow in a database of this machine, from which they are read back."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from loop_helpers import make_loader, run

import eqxshard
from eqxshard.trackers import Image, MLflow
from eqxshard.trackers._mlflow import _Sender


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A client of a database, which takes seconds to make."""
    mlflow = pytest.importorskip("mlflow", reason="no MLflow; run nox -s slow")
    folder = tmp_path_factory.mktemp("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.create_experiment("tests", artifact_location=folder.as_uri())
    return client


@pytest.fixture
def client(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.tracking_uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "tests")
    return store


def kept(folder):
    return json.loads((folder / "mlflow.json").read_text())


def steps(client, folder, name="train/loss"):
    return [x.step for x in client.get_metric_history(kept(folder)["id"], name)]


# Of SQLAlchemy, which MLflow's database is made with.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.slow
def test_numbers_and_images_are_in_the_run(client, tmp_path):
    settings = {"width": 7, "width [px]": "x" * 7_000}
    tracker = MLflow(tmp_path, name="mlp", settings=settings)
    assert isinstance(tracker, eqxshard.Tracker)
    tracker.log(2, {"train/loss": 2.0, "norm/w[0]": np.float64(3.0)})
    tracker.log(4, {"train/loss": float("inf"), "x": Image(np.zeros((4, 5)))})
    tracker.close()
    tracker.close()
    found = client.get_run(kept(tmp_path)["id"])
    assert (found.info.run_name, found.info.status) == ("mlp", "FINISHED")
    assert found.data.params == {"width": "7", "width _px_": 6_000 * "x"}
    assert found.data.metrics["norm/w_0_"] == 3.0
    history = client.get_metric_history(found.info.run_id, "train/loss")
    first, second = history
    assert (first.step, first.value) == (2, 2.0)
    assert second.step == 4 and second.value > 1e300
    folder = Path(found.info.artifact_uri.removeprefix("file://"))
    assert len([*folder.glob("images/x*.png")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "error, status", [(KeyboardInterrupt(), "KILLED"), (RuntimeError("a bug"), "FAILED")]
)
def test_a_resumed_run_sends_each_step_once(client, tmp_path, error, status):
    def stop(loop):
        if loop.step == 4:
            raise error

    loader = make_loader()
    with pytest.raises(type(error)):
        callbacks = [eqxshard.callbacks.Every(1, stop)]
        options = {"trackers": [MLflow(tmp_path)], "callbacks": callbacks}
        run(None, loader, steps=6, log_every=1, **options)
    id = kept(tmp_path)["id"]
    assert client.get_run(id).info.status == status
    assert steps(client, tmp_path) == [1, 2, 3]
    run(None, loader, steps=6, log_every=1, trackers=[MLflow(tmp_path, resume=True)])
    assert kept(tmp_path) == {"id": id, "step": 6}
    assert client.get_run(id).info.status == "FINISHED"
    assert steps(client, tmp_path) == [1, 2, 3, 4, 5, 6]
    MLflow(tmp_path).close()
    assert kept(tmp_path)["id"] != id


@pytest.mark.slow
def test_a_server_that_is_not_there_is_refused(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"at http://127\.0\.0\.1:9: .* Set MLFLOW_TRAC"):
        MLflow(tmp_path)


@pytest.mark.slow
def test_only_the_first_process_has_a_run(client, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    tracker = MLflow(tmp_path / "run")
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert not (tmp_path / "run").exists()


def test_calls_are_made_in_order_and_errors_come_later():
    called, ready = [], threading.Event()

    def fails():
        ready.wait()
        raise RuntimeError("no route to host")

    sender = _Sender()
    sender.send(fails)
    for i in range(3):
        sender.send(lambda i=i: called.append(i))
    with pytest.raises(OSError, match=r"not taken the last \d+ reports in 0.01 s"):
        sender.close(lambda: called.append("the end"), 0.01)
    # It answers again while the run waits.
    ready.set()
    with pytest.raises(OSError, match="MLflow refused a report: no route to host"):
        sender.close(lambda: None, 60)
    assert called == [0, 1, 2, "the end"]


def test_only_so_many_reports_wait_for_a_server(monkeypatch, caplog):
    monkeypatch.setattr("eqxshard.trackers._mlflow._MOST_WAITING", 3)
    called, began, ready = [], threading.Event(), threading.Event()
    sender = _Sender()
    sender.send(lambda: (began.set(), ready.wait(), called.append(0)))
    # The first is on its way, and waits no more.
    assert began.wait(60)
    for i in range(1, 20):
        sender.send(lambda i=i: called.append(i))
    ready.set()
    sender.close(lambda: None, 60)
    assert called == [0, 1, 2, 3]
    assert "3 reports; later ones are dropped" in caplog.text
    assert len(caplog.records) == 1
