"""Stalls, and what is logged of them."""

import re
import threading
import time

import numpy as np
import pytest
from loop_helpers import ROWS, fresh, make_loader, make_mesh

import eqxshard
from eqxshard.loop import _clock
from eqxshard.loop._clock import Clock, watch


def wait_until_logged(caplog, text):
    deadline = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("what", ["the batch of step 4", "step 4", "the evaluation after"])
def test_whatever_a_run_does_may_stall(caplog, capfd, what):
    def stalls(where):
        if what.startswith(where):
            wait_until_logged(caplog, f"waiting for {what}")

    class Slow:
        def __len__(self):
            return ROWS

        def gather(self, indices):
            if 24 in indices:
                stalls("the batch of")
            return {"x": np.ones((len(indices), 4), np.float32)}

    state, train_step = fresh()
    # Compiles, so that nothing else stalls.
    state = eqxshard.fit(state, train_step, make_loader(), steps=1)

    def step(state, batch):
        if int(state.step) == 3:
            stalls("step")
        return train_step(state, batch)

    def evaluate(model):
        stalls("the evaluation")
        return {}

    options: dict = {"batch_size": 8, "mesh": make_mesh(), "shuffle": False, "prefetch": 0}
    loader = eqxshard.Loader(Slow(), **options)
    eqxshard.fit(state, step, loader, epochs=1, evaluate=evaluate, stall_seconds=0.5)
    # On a busy machine, others may stall as well.
    (line,) = re.findall(f"no progress for .* {what}.*", caplog.text)
    assert line.endswith("; the stacks of all threads are above, on stderr.")
    assert "in wait_until_logged" in capfd.readouterr().err


@pytest.fixture
def ended(monkeypatch):
    """Set once a watchdog ends the process."""
    asked = threading.Event()
    # As it does not end here, it is ended again and again.
    monkeypatch.setattr(_clock, "abort_process", lambda status: asked.set())
    return asked


def test_a_run_that_hangs_is_ended(caplog, ended):
    clock = Clock()
    # Without stall_seconds, too, it first says where it hangs.
    with watch(clock, None, 0.2), clock.phase("data", "the batch of step 1"):
        assert ended.wait(60)
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "waiting for the batch of step 1; the stacks" in first
    assert re.fullmatch(
        r"no progress for \d+ s: waiting for the batch of step 1, longer than "
        r"hang_seconds=0\.2\. This process ends with status 1; start the run again, to "
        r"resume from its newest checkpoint\.",
        second,
    )


def test_a_run_whose_stall_ends_in_time_is_not_ended(caplog, ended):
    clock = Clock()
    with watch(clock, 0.1, 600.0), clock.phase("device", "step 1"):
        wait_until_logged(caplog, "no progress")
    assert not ended.is_set() and "longer than" not in caplog.text
