"""Runs of MLflow in a database of this machine, from which they are read back."""

import numpy as np
import pytest
from loop_helpers import make_loader, run

import eqxshard
from eqxshard.trackers import Image, MLflow

# SQLAlchemy warns, which MLflow's database is made with.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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


def run_id(folder):
    return (folder / "mlflow_run_id").read_text()


def steps(client, folder, name="train/loss"):
    return [x.step for x in client.get_metric_history(run_id(folder), name)]


def test_numbers_and_settings_are_in_the_run(client, tmp_path):
    settings = {"width": 7, "width [px]": "x" * 7_000} | {f"s{n}": n for n in range(150)}
    tracker = MLflow(tmp_path / "new", name="mlp", settings=settings)
    assert isinstance(tracker, eqxshard.trackers.Tracker)
    tracker.log(2, {"train/loss": 2.0, "norm/w[0]": np.float64(3.0)})
    tracker.log(4, {"train/loss": float("inf"), "x": Image(np.zeros((4, 5)))})
    tracker.close()
    tracker.close()
    found = client.get_run(run_id(tmp_path / "new"))
    assert (found.info.run_name, found.info.status) == ("mlp", "FINISHED")
    assert len(found.data.params) == 152 and found.data.params["s149"] == "149"
    assert found.data.params["width _px_"] == 6_000 * "x"
    assert found.data.metrics.keys() == {"train/loss", "norm/w_0_"}
    assert found.data.metrics["norm/w_0_"] == 3.0
    first, second = client.get_metric_history(found.info.run_id, "train/loss")
    assert (first.step, first.value) == (2, 2.0)
    assert second.step == 4 and second.value > 1e300


@pytest.mark.parametrize(
    "error, status", [(KeyboardInterrupt(), "KILLED"), (RuntimeError("a bug"), "FAILED")]
)
def test_a_resumed_run_is_the_same_run(client, tmp_path, error, status):
    def stop(loop):
        if loop.step == 4:
            raise error

    loader = make_loader()
    with pytest.raises(type(error)):
        callbacks = [eqxshard.callbacks.Every(1, stop)]
        options = {"trackers": [MLflow(tmp_path)], "callbacks": callbacks}
        run(None, loader, steps=6, log_every=1, **options)
    id = run_id(tmp_path)
    assert client.get_run(id).info.status == status
    assert steps(client, tmp_path) == [1, 2, 3]
    tracker = MLflow(tmp_path, settings={"width": 8}, resume=True)
    assert client.get_run(id).info.status == "RUNNING"
    run(None, loader, steps=6, log_every=1, trackers=[tracker])
    assert run_id(tmp_path) == id
    assert client.get_run(id).info.status == "FINISHED"
    assert {*steps(client, tmp_path)} == {1, 2, 3, 4, 5, 6}
    MLflow(tmp_path).close()
    assert run_id(tmp_path) != id


def test_a_server_that_is_not_there_is_refused(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"at http://127\.0\.0\.1:9 \(.*\); set MLFLOW_T"):
        MLflow(tmp_path)


def test_a_server_that_refuses_everything_does_not_end_a_run(client, tmp_path, caplog):
    tracker = MLflow(tmp_path)
    client.delete_run(run_id(tmp_path))
    state = run(None, make_loader(), steps=6, log_every=1, trackers=[tracker])
    assert int(state.step) == 6
    assert "a tracker failed: MLflow did not end the run: " in caplog.text


def test_only_the_first_process_has_a_run(client, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    tracker = MLflow(tmp_path / "run")
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert not (tmp_path / "run").exists()
