"""A run that is stuck, and how its process ends."""

import re
import threading
import time

import numpy as np
import pytest
from loop_helpers import ROWS, fresh, make_loader, make_mesh

import eqxshard
from eqxshard.loop import _clock


@pytest.fixture
def ended(monkeypatch):
    """Set once the watchdog ends the process, which goes on here."""
    asked = threading.Event()

    def end(status):
        assert status == 1
        asked.set()

    monkeypatch.setattr(_clock, "abort_process", end)
    return asked


@pytest.mark.parametrize("what", ["the batch of step 4", "step 4", "the evaluation after"])
def test_whatever_a_run_is_stuck_in_is_named_and_ends_it(caplog, capfd, ended, what):
    def is_stuck(where):
        if what.startswith(where):
            assert ended.wait(60)

    class Slow:
        def __len__(self):
            return ROWS

        def gather(self, indices):
            if 24 in indices:
                is_stuck("the batch of")
            return {"x": np.ones((len(indices), 4), np.float32)}

    state, train_step = fresh()
    # Compiles, so that nothing else takes long.
    state = eqxshard.fit(state, train_step, make_loader(), steps=1)

    def step(state, batch):
        if int(state.step) == 3:
            is_stuck("step")
        return train_step(state, batch)

    def evaluate(model):
        is_stuck("the evaluation")
        return {}

    options: dict = {"batch_size": 8, "mesh": make_mesh(), "shuffle": False, "prefetch": 0}
    loader = eqxshard.Loader(Slow(), **options)
    eqxshard.fit(state, step, loader, epochs=1, evaluate=evaluate, hang_seconds=1.0)
    # On a busy machine, others may take long as well.
    line = re.findall(f"no progress for .* waiting for {what}.*", caplog.text)[0]
    assert "longer than hang_seconds=1: " in line
    assert line.endswith("; start the run again, to resume from its newest checkpoint.")
    assert "in is_stuck" in capfd.readouterr().err


def test_an_evaluation_of_an_hour_is_not_logged(monkeypatch, caplog, capfd, ended):
    late, clock = [0.0], time.perf_counter
    monkeypatch.setattr("time.perf_counter", lambda: clock() + late[0])
    watching = []

    def evaluate(model):
        late[0] = 3600.0
        watching.extend(thread.name for thread in threading.enumerate())
        return {}

    state, train_step = fresh()
    eqxshard.fit(state, train_step, make_loader(), steps=1, evaluate=evaluate)
    assert "watchdog" not in watching and watching
    assert caplog.text == "" and "Thread" not in capfd.readouterr().err


def test_a_run_that_goes_on_is_not_ended(ended):
    state, train_step = fresh()
    eqxshard.fit(state, train_step, make_loader(), steps=3, hang_seconds=600.0)
    assert not ended.is_set()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
