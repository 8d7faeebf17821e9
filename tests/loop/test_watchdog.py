"""Stalls, and what is logged of them."""

import logging
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiles
from loop_helpers import OPTIM, ROWS, fresh, loss_fn, make_loader, make_mesh, run

import eqxshard
from eqxshard.loop import _watchdog
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


@pytest.mark.slow
def test_a_stalled_step_is_reported(caplog):
    sleeps = [0.0]

    def slow_loss(model, batch, key):
        def wait(x):
            time.sleep(sleeps[0])
            return x

        like = jax.ShapeDtypeStruct((), jnp.float32)
        one = jax.pure_callback(wait, like, jnp.float32(1))
        return loss_fn(model, batch, key) * jax.lax.stop_gradient(one)

    state, _ = fresh()
    step = eqxshard.make_train_step(slow_loss, OPTIM, lint={"callback": "off"})
    state = eqxshard.fit(state, step, make_loader(), steps=1)
    sleeps[0] = 1.5
    with caplog.at_level(logging.WARNING), compiles("train_step") as events:
        eqxshard.fit(state, step, make_loader(), steps=5, stall_seconds=0.5)
    # Not compilation took so long.
    assert events == []
    assert re.search(r"no progress for [1-9]\d* s: waiting for step [2-5]\.", caplog.text)
    assert re.search(r"step [2-5] came after \d+ s; training continues\.", caplog.text)


@pytest.fixture
def ended(monkeypatch):
    """The exit statuses of processes that a watchdog ends."""
    statuses = []
    # As it does not end here, it is ended again and again.
    monkeypatch.setattr(_watchdog, "abort_process", statuses.append)
    monkeypatch.setattr(_watchdog, "_LATER_SECONDS", 0.1)
    return statuses


def test_a_run_that_hangs_is_ended(caplog, ended):
    # Without stall_seconds, too, it first says where it hangs.
    says = "longer than hang_seconds"
    with Watchdog(None, 0.2) as watchdog:
        watchdog.waits_for("the batch of step 1")
        wait_until_logged(caplog, says)
    assert set(ended) == {1}
    first, second = (record.getMessage() for record in caplog.records[:2])
    assert "waiting for the batch of step 1. The stacks" in first and "in test_a" in first
    assert re.fullmatch(
        r"no progress for \d+ s, longer than hang_seconds=0\.2: waiting for the batch of "
        r"step 1\. This process ends with status 1; start the run again, to resume from "
        r"its newest checkpoint\.",
        second,
    )


def test_a_run_whose_stall_ends_in_time_is_not_ended(caplog, ended):
    caplog.set_level(logging.WARNING)
    with Watchdog(0.1, 60.0) as watchdog:
        watchdog.waits_for("step 1")
        wait_until_logged(caplog, "no progress")
        # Until the others would have posted what they wait for.
        time.sleep(0.3)
        watchdog.waits_for("step 2")
        wait_until_logged(caplog, "step 1 came after 0 s")
    assert ended == [] and "longer than" not in caplog.text


@pytest.mark.parametrize(
    "waits, guess",
    [
        ({0: "step 9", 1: "the batch of step 8"}, " Most likely all wait for process 1."),
        # One that computes without a pause says nothing.
        ({0: "step 9"}, " Most likely all wait for process 1."),
        (
            {0: "the others' callbacks (after_step) of step 9", 1: "the callbacks"},
            " Most likely all wait for process 1.",
        ),
        ({0: "step 9", 1: "step 9"}, ""),
    ],
)
def test_the_process_that_the_others_wait_for_is_named(monkeypatch, waits, guess):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_watchdog, "read_posts", lambda _: waits)
    says = _watchdog._describe_posts()
    assert says is not None
    assert says.partition(".")[2] == guess
    assert says.startswith(f"the processes wait: process 0 for {waits[0]}; process 1 ")


def test_a_run_that_does_not_stall_is_not_reported(caplog):
    run(None, make_loader(), epochs=1, stall_seconds=60.0)
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["stall_seconds", "hang_seconds"])
def test_a_stall_cannot_be_shorter_than_nothing(name):
    with pytest.raises(ValueError, match=rf"{name} must be positive, got 0\.0; use"):
        Watchdog(**{"stall_seconds": None, name: 0.0})
