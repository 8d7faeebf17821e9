"""Runs of W&B in its offline mode, whose files are read back."""

import importlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from loop_helpers import make_loader, run

import eqxshard
from eqxshard.trackers import Image, WandB

BLOCK = 32_768
pytestmark = pytest.mark.slow


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B, as it is used without a server."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; run nox -s slow")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    wandb.teardown()  # It reads the environment once.
    yield wandb
    wandb.teardown()


def records(file):
    """The records of a file of W&B, which has the format of LevelDB's log."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, position, part = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # The rest of a block.
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # Whole, or the last part.
            record = protocol.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def read(folder, wandb):
    """For each start of a run: its id, config, history by step, and exit code."""
    wandb.teardown()  # Its own process may still be writing.
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        found = {"history": {}}
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["id"], found["name"] = record.run.run_id, record.run.display_name
                config = record.run.config.update
                found["config"] = {x.key: json.loads(x.value_json) for x in config}
            elif kind == "history":
                items = record.history.item
                values = {
                    x.key or ".".join(x.nested_key): json.loads(x.value_json) for x in items
                }
                row = found["history"].setdefault(values.pop("_step"), {})
                row |= {k: v for k, v in values.items() if not k.startswith("_")}
            elif kind == "exit":
                found["exit"] = record.exit.exit_code
        yield found


def test_numbers_and_settings_are_in_the_run(offline, tmp_path):
    tracker = WandB(tmp_path / "new", name="mlp", settings={"width": 64})
    assert isinstance(tracker, eqxshard.trackers.Tracker)
    tracker.log(2, {"train/loss": 2.0})
    tracker.log(4, {"train/loss": np.float64(1.5), "x": Image(np.zeros((4, 5, 3)))})
    tracker.close()
    tracker.close()
    (found,) = read(tmp_path / "new", offline)
    assert found["name"] == "mlp" and found["config"]["width"] == 64
    history = {2: {"train/loss": 2.0}, 4: {"train/loss": 1.5}}
    assert found["exit"] == 0 and found["history"] == history


def test_a_resumed_run_is_the_same_run(offline, tmp_path):
    def stop(step):
        if step == 4:
            raise KeyboardInterrupt

    loader = make_loader()

    def train(steps, resume, callback=None):
        tracker = WandB(tmp_path, resume=resume)
        callbacks = [eqxshard.callbacks.Every(1, callback)] if callback else []
        run(None, loader, steps=steps, log_every=1, trackers=[tracker], callbacks=callbacks)

    with pytest.raises(KeyboardInterrupt):
        train(6, False, lambda loop: stop(loop.step))
    train(6, True)
    stopped, resumed = read(tmp_path, offline)
    assert stopped["id"] == resumed["id"] == (tmp_path / "wandb_run_id").read_text()
    assert (stopped["exit"], resumed["exit"]) == (1, 0)
    assert [*stopped["history"]] == [1, 2, 3]
    assert [*resumed["history"]][-3:] == [4, 5, 6]
    train(1, False)
    assert (tmp_path / "wandb_run_id").read_text() != stopped["id"]


def test_a_server_that_is_away_is_refused(offline, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    with pytest.raises(
        ValueError, match=r"W&B cannot start the run \(.*WANDB_MODE=offline"
    ):
        WandB(tmp_path)
    assert not (tmp_path / "wandb_run_id").exists()


def test_errors_of_the_service_do_not_end_a_run(offline, tmp_path, caplog):
    tracker = WandB(tmp_path)
    tracker._run.finish()  # Refuses everything from now on.
    state = run(None, make_loader(), steps=6, log_every=1, trackers=[tracker])
    assert int(state.step) == 6
    assert "a tracker failed: W&B did not take the values of step 1: " in caplog.text


def test_only_the_first_process_has_a_run(offline, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    tracker = WandB(tmp_path / "wandb")
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert not (tmp_path / "wandb").exists()
