"""Callbacks: when they are called, and what a run costs without them."""

import jax
import pytest
from loop_helpers import Recorder, count_dispatched, fresh, make_loader

import eqxshard
from eqxshard.callbacks import Callback
from eqxshard.loop import _loop
from eqxshard.loop._callbacks import CallbackList
from eqxshard.loop._clock import Clock
from eqxshard.loop._loop import Loop
from eqxshard.loop._step_metrics import Report

# Epochs of 6 steps.


class Events(Callback):
    """Records every call."""

    def __init__(self, every=None, name=""):
        self.every = every
        self.name = name
        self.seen = []

    def after_step(self, loop):
        self.seen.append(f"{self.name}step {loop.step}")

    def after_evaluation(self, loop):
        self.seen.append(f"{self.name}evaluation {loop.step}")

    def after_report(self, loop):
        self.seen.append(f"{self.name}report {loop.step}")

    def after_save(self, loop):
        self.seen.append(f"{self.name}save {loop.step}")

    def close(self, error=None):
        self.seen.append(f"{self.name}close")

    # It is also a tracker.
    def log(self, step, values):
        self.seen.append(f"log {step}")


def fit(steps=6, loader=None, **options):
    state, train_step = fresh()
    return eqxshard.fit(state, train_step, loader or make_loader(), steps=steps, **options)


@pytest.mark.slow
def test_the_order_of_calls(tmp_path):
    events, other = Events(every=2), Events(every=3, name="other ")
    other.seen = events.seen
    tracker = Events()
    tracker.seen = events.seen

    def evaluate(model):
        events.seen.append("evaluate")
        return {}

    fit(
        evaluate=evaluate,
        evaluate_every=4,
        log_every=4,
        steps=5,
        callbacks=[events, other],
        trackers=[tracker],
        checkpointer=eqxshard.Checkpointer(tmp_path),
    )
    assert events.seen == [
        *["step 2", "other step 3", "step 4"],
        *["evaluate", "evaluation 4", "other evaluation 4"],
        *["report 4", "other report 4", "log 4"],
        *["evaluate", "evaluation 5", "other evaluation 5"],
        *["report 5", "other report 5", "log 5", "save 5", "other save 5"],
        *["other close", "close", "close"],
    ]


@pytest.mark.parametrize(
    "every, steps", [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (None, [])]
)
def test_steps_are_counted_from_the_start_of_the_run(every, steps):
    class Steps(Callback):
        def after_step(self, loop):
            seen.append(loop.step)

    seen: list[int] = []
    callback = Steps()
    callback.every = every
    state, train_step = fresh()
    state = eqxshard.fit(state, train_step, make_loader(), steps=2, callbacks=[callback])
    eqxshard.fit(state, train_step, make_loader(), steps=7, callbacks=[callback])
    assert seen == steps


def test_dispatches_of_a_resident_dataset_end_where_a_callback_is_due(monkeypatch):
    taken = count_dispatched(monkeypatch)
    losses: list[float] = []

    class Losses(Callback):
        every = 4

        def after_step(self, loop):
            losses.append(loop.metrics.compute()["loss"])

    loader = make_loader(placement="device")
    fit(10, loader, callbacks=[Losses()], log_every=6)
    assert taken == [4, 2, 2, 2]
    recorder = Recorder()
    fit(10, trackers=[recorder], log_every=1)
    every = [values["train/loss"] for _, values in recorder.lines]
    assert losses == pytest.approx([every[3], every[7]])


def test_a_callback_of_each_kind_continues_from_its_checkpoint(tmp_path):
    class Counts(Callback):
        def __init__(self):
            self.count = 0

        def after_step(self, loop):
            self.count += 1

        def state(self):
            return {"count": self.count}

        def restore(self, state):
            self.count = state["count"]

    def run(steps, state, train_step, **options):
        callbacks = [Counts(), Counts()]
        callbacks[1].every = 2
        checkpointer = eqxshard.Checkpointer(tmp_path, **options)
        eqxshard.fit(
            checkpointer.restore(state) if checkpointer.steps() else state,
            train_step,
            make_loader(),
            steps=steps,
            callbacks=callbacks,
            checkpointer=checkpointer,
        )
        return [each.count for each in callbacks], checkpointer

    counts, checkpointer = run(4, *fresh())
    assert counts == [4, 2]
    saved = checkpointer.description(4)["callbacks"]
    assert saved == {"Counts": {"count": 4}, "Counts 2": {"count": 2}}
    assert run(7, *fresh())[0] == [7, 3]


def test_a_misspelt_method_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r"Counts\.after_steps is .*; override one"):
        type("Counts", (Callback,), {"after_steps": print})


def test_waiting_for_the_callbacks_of_others_is_not_their_time(monkeypatch):
    clock = Clock()
    loop = Loop(clock, Report([], clock, None), make_loader(), None, None, step=7)
    seen = []

    def wait(value):
        seen.append(clock.now[:2])
        return [value, ["the other asks", True]]

    class Notes(Callback):
        def after_report(self, loop):
            seen.append(clock.now[:2])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_loop, "allgather_json", wait)
    CallbackList([Notes()], loop).after("report")
    assert seen == [
        ("callbacks", "the callbacks (after_report) of step 7"),
        ("other", "the others' callbacks (after_report) of step 7"),
    ]
    assert (loop.stop_reason, loop.save_requested) == ("the other asks", True)
