"""The time of a run by its parts: by a clock that is told, and in real runs."""

import sys
from contextlib import closing
from typing import Any

import equinox as eqx
import numpy as np
import pytest
from loop_helpers import Recorder, fresh, make_loader

import eqxshard
from eqxshard.loop._clock import Clock, Phase, announced, describe_time, goodput

PARTS = ["data", "dispatch", "device", "compile", "evaluation", "checkpoint"]
PARTS += ["callbacks", "log", "other"]
NONE = dict.fromkeys(PARTS, 0.0)


# A clock that is told


@pytest.fixture
def now(monkeypatch):
    """The time, which passes only if it is told to."""
    times = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: times[0])
    return times


def test_each_moment_counts_for_one_part(now):
    clock = Clock()
    now[0] += 1
    with clock.phase("data", "a batch"):
        now[0] += 2
        with clock.phase("device", "the devices"):
            now[0] += 4
            assert clock.now == Phase("device", "the devices", 103)
        now[0] += 8
        # Again from here on.
        assert clock.now == Phase("data", "a batch", 107)
    assert clock.read() == {**NONE, "other": 1, "data": 10, "device": 4}
    with pytest.raises(ZeroDivisionError), clock.phase("dispatch", "a step"):
        now[0] += 32
        raise ZeroDivisionError
    now[0] += 16
    assert clock.read() == {**NONE, "other": 16, "dispatch": 32}
    assert clock.totals == {**NONE, "other": 17, "data": 10, "device": 4, "dispatch": 32}
    assert goodput(clock.totals) == 36 / 63


@pytest.mark.parametrize("in_logs", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_says_that_a_step_compiles(now, terminal, in_logs, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with announced("compiling the train step", in_logs=in_logs):
        begun = capsys.readouterr().err
        now[0] += 9
    said = "", ""
    if terminal:
        said = "compiling the train step ... ", "9.0 s\n"
    elif in_logs:
        said = "compiling the train step ...\n", ""
    assert (begun, capsys.readouterr().err) == said


# Runs


@pytest.fixture
def takes(now):
    """Lets some seconds pass, and returns a result."""

    def wait(seconds, result: Any = None):
        now[0] += seconds
        return result

    return wait


class Batches:
    """A loader without a length."""

    def __init__(self, takes):
        self.takes = takes

    def seek(self, step):
        self.takes(0.5)

    def __iter__(self):
        with closing(iter(make_loader())) as batches:
            try:
                for batch in batches:
                    yield self.takes(10, batch)
            finally:
                self.takes(1.5)


class SlowTracker(Recorder):
    def __init__(self, takes):
        super().__init__()
        self.takes = takes

    def log(self, step, values):
        super().log(step, values)
        self.takes(1e5)

    def close(self, error=None):
        self.takes(2e4)


class SlowCallback(eqxshard.callbacks.Callback):
    every = 2

    def __init__(self, takes):
        self.takes = takes

    def after_step(self, loop):
        self.takes(1e4)

    after_report = after_save = after_step

    def close(self):
        self.takes(1e4)


def all_times(recorder):
    """The seconds of each part, of all reports."""
    lines = [values for _, values in recorder.lines]
    return {part: sum(line[f"seconds/{part}"] for line in lines) for part in PARTS}


def near(**seconds):
    return pytest.approx({**NONE, **seconds})


def test_the_parts_of_a_run_add_up_to_what_is_printed(now, takes, tmp_path, monkeypatch):
    printed = {}
    describe = lambda totals: printed.update(totals) or ""  # noqa: E731
    monkeypatch.setattr("eqxshard.loop._fit.describe_time", describe)
    save, close = eqxshard.Checkpointer.save, eqxshard.Checkpointer.close
    slow_save = lambda *args, **kwargs: takes(1e6, save(*args, **kwargs))  # noqa: E731
    monkeypatch.setattr(eqxshard.Checkpointer, "save", slow_save)
    monkeypatch.setattr(eqxshard.Checkpointer, "close", lambda c: takes(5e6, close(c)))
    state, train_step = fresh()
    tracker = SlowTracker(takes)
    eqxshard.fit(
        state,
        lambda *args: takes(100, train_step(*args)),
        Batches(takes),
        steps=4,
        log_every=2,
        evaluate=lambda model: takes(1_000, {}),
        evaluate_every=2,
        checkpointer=eqxshard.Checkpointer(tmp_path, save_every=2),
        trackers=[tracker],
        callbacks=[SlowCallback(takes)],
    )
    # A report has the times before it; the last line has the sums of all reports.
    assert [step for step, _ in tracker.lines] == [2, 4]
    found = all_times(tracker)
    assert (
        printed
        == found
        == near(
            data=40,
            compile=100,
            dispatch=300,
            evaluation=2_000,
            checkpoint=1e6,
            callbacks=5e4,
            log=1e5,
            other=0.5,
        )
    )
    assert tracker.lines[-1][1]["goodput"] == pytest.approx(goodput(found))


def fails(run):
    raise RuntimeError("a bug")


def test_a_run_that_an_error_ends_tells_its_time(takes, capfd):
    state, train_step = fresh()
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="a bug"):
        eqxshard.fit(
            state,
            lambda *args: takes(3, train_step(*args)),
            Batches(takes),
            steps=6,
            evaluate=fails,
            evaluate_every=4,
            trackers=[recorder],
        )
    assert [step for step, _ in recorder.lines] == [4]
    # The seconds of 4 steps, and of 4 batches.
    assert all_times(recorder) == near(data=40, compile=3, dispatch=9, other=2)
    said = "goodput 17 % of 54.0 s | data 74 % | compile 6 % | other 4 %\n"
    assert capfd.readouterr().err == f"compiling the train step ...\n{said}"


class Weight(np.ndarray):
    """Records when somebody waits for it."""

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


def test_the_line_names_the_largest_losses_first():
    seconds = {**NONE, "device": 60.0, "dispatch": 33.0, "data": 1.0, "compile": 6.0}
    line = "goodput 93 % of 1 min 40 s | compile 6 % | data 1 %"
    assert describe_time(seconds) == line
    assert describe_time({**NONE, "other": 59.9}) == "goodput 0 % of 59.9 s | other 100 %"
    assert describe_time({**NONE, "device": 10_859.0}) == "goodput 100 % of 3 h 0 min"
