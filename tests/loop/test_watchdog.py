"""Stalls, and what is logged of them."""

import logging
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compiles
from loop_helpers import OPTIM, ROWS, loss_fn, make, make_loader, make_mesh, run

import eqxshard


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
    state, step = make()
    # Compiles, so that only the source can stall the run.
    state = eqxshard.fit(state, step, make_loader(), steps=1)
    with caplog.at_level(logging.WARNING):
        eqxshard.fit(state, step, loader, epochs=1, stall_seconds=0.5)
    # On a busy machine, others may stall as well.
    (line,) = re.findall("no progress for .* step 4.*", caplog.text)
    assert line.endswith("waiting for the batch of step 4. The stacks of all threads:")
    assert "in gather" in caplog.text and "wait_until_logged(caplog" in caplog.text
    assert re.search(r"the batch of step 4 came after \d+ s; training con", caplog.text)


def test_a_stalled_step_is_reported(caplog):
    sleeps = [0.0]

    def slow_loss(model, batch, key):
        def wait(x):
            time.sleep(sleeps[0])
            return x

        like = jax.ShapeDtypeStruct((), jnp.float32)
        one = jax.pure_callback(wait, like, jnp.float32(1))
        return loss_fn(model, batch, key) * jax.lax.stop_gradient(one)

    state, _ = make()
    step = eqxshard.make_train_step(slow_loss, OPTIM, lint={"dtype": "off"})
    state = eqxshard.fit(state, step, make_loader(), steps=1)
    sleeps[0] = 1.5
    with caplog.at_level(logging.WARNING), compiles("train_step") as events:
        eqxshard.fit(state, step, make_loader(), steps=5, stall_seconds=0.5)
    # Not compilation took so long.
    assert events == []
    assert re.search(r"no progress for [1-9]\d* s: waiting for step [2-5]\.", caplog.text)
    assert re.search(r"step [2-5] came after \d+ s; training continues\.", caplog.text)


def test_a_run_that_does_not_stall_is_not_reported(caplog):
    run(None, make_loader(), epochs=1, stall_seconds=60.0)
    assert caplog.text == ""


def test_a_stall_cannot_be_shorter_than_nothing():
    with pytest.raises(ValueError, match=r"stall_seconds must be positive, got 0\.0; use"):
        run(None, make_loader(), epochs=1, stall_seconds=0.0)
