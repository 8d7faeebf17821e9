"""Where the time between reports goes: by a clock that is told, and in real runs."""

import time
from contextlib import closing
from functools import cache
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from helpers import make_mesh
from loop_helpers import Recorder, fresh, make_loader

import eqxshard
from eqxshard.callbacks import Every
from eqxshard.loop._clock import Clock
from eqxshard.trackers._values import metrics

PHASES = [f"seconds/{phase}" for phase in ("data", "dispatch", "device", "log")]
LONG = 0.2


@pytest.fixture
def now(monkeypatch):
    """The time, which passes only if it is told to."""
    times = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: times[0])
    return times


def test_each_moment_counts_for_one_phase_or_none(now):
    clock = Clock()
    now[0] += 1
    clock.lap("data")
    now[0] += 2
    clock.lap("device")
    now[0] += 4
    clock.lap("data")
    now[0] += 8
    clock.skip()
    now[0] += 16
    clock.lap("log")
    assert clock.read() == {"data": 5, "dispatch": 0, "device": 2, "log": 16}
    now[0] += 32
    clock.lap("dispatch")
    assert clock.read() == {"data": 0, "dispatch": 32, "device": 0, "log": 0}


def wait(result: Any = None):
    time.sleep(LONG)
    return result


@cache
def slow_on_devices():
    """Returns a number that the devices compute for long."""
    compute = jax.shard_map(
        lambda number: jax.pure_callback(wait, number, number),
        mesh=make_mesh(),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    return jax.jit(compute)


class Batches:
    """A loader without a length."""

    def __init__(self, slow):
        self.slow = slow

    def seek(self, step):
        self.batches = iter(make_loader())

    def __iter__(self):
        with closing(self.batches):
            for batch in self.batches:
                yield wait(batch) if self.slow else batch


class Waits(Recorder):
    def log(self, step, values):
        wait()
        super().log(step, values)


def times(slow):
    """The times in the second report of a run of which one part is slow."""
    state, train_step = fresh()

    def step(state, batch):
        if slow == "dispatch":
            wait()
        state, metrics = train_step(state, batch)
        if slow == "device":
            weight = slow_on_devices()(metrics.weight)
            metrics = eqx.tree_at(lambda m: m.weight, metrics, weight)
        return state, metrics

    recorder = Waits() if slow == "tracker" else Recorder()
    eqxshard.fit(
        state,
        step,
        Batches(slow == "data"),
        steps=4,
        log_every=2,
        evaluate=(lambda model: wait({})) if slow == "evaluation" else None,
        evaluate_every=2,
        trackers=[recorder],
        callbacks=[Every(1, lambda run: wait())] if slow == "callback" else [],
    )
    (_, first), (_, second) = recorder.lines
    assert [name for name in first if name.startswith("seconds/")] == PHASES
    return second


def longest(found):
    return max(PHASES, key=lambda name: found[name])


@pytest.mark.parametrize("phase", ["data", "dispatch", "device"])
def test_a_slow_part_of_each_step_is_told_from_the_others(phase):
    found = times(phase)
    # A report comes when the next step is dispatched, so one step is in the second.
    assert found[f"seconds/{phase}"] >= LONG and longest(found) == f"seconds/{phase}"
    # The rest is Python between the steps.
    assert 0 <= found["train/seconds"] - sum(found[name] for name in PHASES[:3]) < LONG


class Weight(np.ndarray):
    """Notes when somebody waits for it."""

    name = ""

    def block_until_ready(self):
        events.append(f"wait {self.name}")


events: list[str] = []


def test_at_most_two_steps_of_any_kind_are_in_flight():
    """Also where the train step is not this library's."""
    state, train_step = fresh()

    def step(state, batch):
        state, metrics = train_step(state, batch)
        weight = np.array(8, np.float32).view(Weight)
        weight.name = str(int(state.step))
        events.append(f"step {weight.name}")
        return state, eqx.tree_at(lambda m: m.weight, metrics, weight)

    eqxshard.fit(state, step, make_loader(), steps=4)
    assert events == ["step 1", "step 2", "wait 1", "step 3", "wait 2", "step 4"]


def test_callbacks_and_trackers_count_as_log():
    found = times("callback")
    assert found["seconds/log"] >= 2 * LONG and longest(found) == "seconds/log"
    # That of the first report, which is not training time.
    found = times("tracker")
    assert found["seconds/log"] >= LONG > found["train/seconds"]


def test_evaluations_do_not_count():
    found = times("evaluation")
    assert sum(found[name] for name in PHASES) < LONG


def test_the_progress_bar_and_curves_leave_them_out():
    values = dict.fromkeys([*PHASES, "train/loss"], 1.0)
    assert [metric.name for metric in metrics(values)] == ["loss"]
