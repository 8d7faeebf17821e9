"""Runs of MLflow in a database of this machine, from which they are read back."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from loop_helpers import make_loader, run

import eqxshard
from eqxshard.trackers import Histogram, Image, MLflow


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


pytestmark = [
    # Of SQLAlchemy, which MLflow's database is made with.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.slow,
]


def test_numbers_images_and_histograms_are_in_the_run(client, tmp_path):
    settings = {f"width {i}": i for i in range(120)} | {"width [px]": "x" * 7_000}
    tracker = MLflow(tmp_path, name="mlp", settings=settings)
    assert isinstance(tracker, eqxshard.Tracker)
    tracker.log(2, {"train/loss": 2.0, "norm/w[0]": np.float64(3.0)})
    image, histogram = Image(np.zeros((4, 5))), Histogram(np.arange(4.0), bins=2)
    tracker.log(4, {"train/loss": float("inf"), "x": image, "w": histogram})
    tracker.close()
    tracker.close()
    found = client.get_run(kept(tmp_path)["id"])
    assert (found.info.run_name, found.info.status) == ("mlp", "FINISHED")
    assert len(found.data.params) == 121 and found.data.params["width 7"] == "7"
    assert len(found.data.params["width _px_"]) == 6_000
    assert found.data.metrics["norm/w_0_"] == 3.0
    history = client.get_metric_history(found.info.run_id, "train/loss")
    first, second = history
    assert (first.step, first.value) == (2, 2.0)
    assert second.step == 4 and second.value > 1e300
    folder = Path(found.info.artifact_uri.removeprefix("file://"))
    assert len([*folder.glob("images/x*.png")]) == 1
    values = json.loads((folder / "histograms" / "w" / "4.json").read_text())
    assert values == {"counts": [2.0, 2.0], "edges": [0.0, 1.5, 3.0]}


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


def test_a_server_that_goes_away_is_logged(client, tmp_path, monkeypatch, caplog):
    tracker = MLflow(tmp_path)
    failed = threading.Event()

    def fail(*args, **options):
        failed.set()
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tracker._client, "log_batch", fail)
    wait = eqxshard.callbacks.Every(1, lambda loop: loop.step < 3 or failed.wait())
    run(None, make_loader(), steps=4, log_every=1, trackers=[tracker], callbacks=[wait])
    said = "a tracker failed: MLflow refused a report: no route to host. Training continues"
    assert said in caplog.text
    assert client.get_run(kept(tmp_path)["id"]).info.status == "FINISHED"


def test_a_server_that_is_not_there_is_refused(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"at http://127\.0\.0\.1:9: .* Set MLFLOW_TRAC"):
        MLflow(tmp_path)


def test_only_the_first_process_has_a_run(client, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    tracker = MLflow(tmp_path / "run")
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert not (tmp_path / "run").exists()
