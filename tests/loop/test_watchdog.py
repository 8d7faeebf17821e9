"""Stalls, and what is logged of them."""

import logging
import re
import threading
import time

import numpy as np
import pytest
from loop_helpers import ROWS, fresh, make_loader, make_mesh, run

import eqxshard
from eqxshard.loop import _watchdog
from eqxshard.loop._clock import Clock
from eqxshard.loop._watchdog import Watchdog


def wait_until_logged(caplog, text):
    deadline = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stalled_source_is_reported_with_its_stack(caplog):
    class Slow:
        def __len__(self):
            return ROWS

        def gather(self, indices):
            if 24 in indices:
                wait_until_logged(caplog, "the batch of step 4")
            return {"x": np.ones((len(indices), 4), np.float32)}

    loader = eqxshard.Loader(
        Slow(), batch_size=8, mesh=make_mesh(), shuffle=False, prefetch=0
    )
    state, step = fresh()
    # Compiles, so that only the source can stall the run.
    state = eqxshard.fit(state, step, make_loader(), steps=1)
    with caplog.at_level(logging.WARNING):
        eqxshard.fit(state, step, loader, epochs=1, stall_seconds=0.5)
    # On a busy machine, others may stall as well.
    (line,) = re.findall("no progress for .* step 4.*", caplog.text)
    assert line.endswith("waiting for the batch of step 4. The stacks of all threads:")
    assert "in gather" in caplog.text and "wait_until_logged(caplog" in caplog.text
    assert re.search(r"the batch of step 4 came after \d+ s; training con", caplog.text)


@pytest.mark.parametrize("what", ["step 2", "the evaluation after step 2"])
def test_whatever_a_run_does_may_stall(caplog, what):
    state, train_step = fresh()
    # Compiles, so that nothing else stalls.
    state = eqxshard.fit(state, train_step, make_loader(), steps=1)

    def step(state, batch):
        if what.startswith("step") and int(state.step) == 1:
            wait_until_logged(caplog, f"waiting for {what}.")
        return train_step(state, batch)

    def evaluate(model):
        wait_until_logged(caplog, f"waiting for {what}.")
        return {}

    options: dict = {} if what.startswith("step") else {"evaluate": evaluate}
    eqxshard.fit(state, step, make_loader(), steps=2, stall_seconds=0.5, **options)
    assert f"{what} came after " in caplog.text


@pytest.fixture
def ended(monkeypatch):
    """Set once a watchdog ends the process."""
    asked = threading.Event()
    # As it does not end here, it is ended again and again.
    monkeypatch.setattr(_watchdog, "abort_process", lambda status: asked.set())
    return asked


def test_a_run_that_hangs_is_ended(caplog, ended):
    clock = Clock()
    # Without stall_seconds, too, it first says where it hangs.
    with Watchdog(clock, None, 0.2), clock.phase("data", "the batch of step 1"):
        assert ended.wait(60)
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "waiting for the batch of step 1. The stacks" in first and "in test_a" in first
    assert re.fullmatch(
        r"no progress for \d+ s: waiting for the batch of step 1, longer than "
        r"hang_seconds=0\.2\. This process ends with status 1; start the run again, to "
        r"resume from its newest checkpoint\.",
        second,
    )


def test_a_run_whose_stall_ends_in_time_is_not_ended(caplog, ended):
    caplog.set_level(logging.WARNING)
    clock = Clock()
    with Watchdog(clock, 0.1, 600.0):
        with clock.phase("device", "step 1"):
            wait_until_logged(caplog, "no progress")
        wait_until_logged(caplog, "step 1 came after")
    assert not ended.is_set() and "longer than" not in caplog.text


def test_a_run_that_does_not_stall_is_not_reported(caplog):
    run(None, make_loader(), epochs=1, stall_seconds=60.0)
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["stall_seconds", "hang_seconds"])
def test_a_stall_cannot_be_shorter_than_nothing(name):
    with pytest.raises(ValueError, match=rf"{name} must be positive, got 0\.0; use"):
        Watchdog(Clock(), **{"stall_seconds": None, name: 0.0})
