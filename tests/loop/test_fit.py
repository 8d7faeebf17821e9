import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import OPTIM, new_state, train_step
from helpers import (
    assert_equal,
    make_loader,
    squared_errors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_helpers import Recorder, count_dispatched
from step_helpers import mean_of_x

import eqxshard
from eqxshard.callbacks import Every
from eqxshard.training import Metrics

_ = train_step  # A fixture.


@pytest.mark.versions
def test_fit_is_the_loop_written_by_hand(train_step):
    by_hand, loader = new_state(), make_loader(epochs=3)
    losses = []
    for batch in loader:
        by_hand, metrics = train_step(by_hand, batch)
        losses.append(metrics)
    recorder = Recorder()
    fitted = eqxshard.fit(
        new_state(), train_step, make_loader(), epochs=3, trackers=[recorder], log_every=2
    )
    assert_equal(fitted, by_hand)
    assert int(fitted.step) == 12
    # Reports at every second step and at the end of each epoch, each of the steps since.
    assert recorder.steps("train/loss") == [2, 4, 6, 8, 10, 12]
    for step, values in recorder.lines:
        since = Metrics.stack(losses[step - 2 : step]).compute()
        assert values["train/loss"] == pytest.approx(since["loss"], rel=1e-6)
        assert values["epoch"] == pytest.approx(step // 4 + step % 4 * 32 / 100)
        examples = 64 if step % 4 else 36  # the fourth batch of an epoch has 4 of 32 rows
        speed = values["train/examples_per_second"]
        # The first is without the step that compiled.
        assert step == 2 or speed * values["train/seconds"] == pytest.approx(examples)
    assert recorder.closed == [None]


@pytest.mark.versions
@settings(max_examples=8, deadline=None)
@given(stop=st.integers(1, 11))
def test_a_resumed_run_equals_the_uninterrupted_one(train_step, stop):
    whole = eqxshard.fit(new_state(), train_step, make_loader(), steps=12)
    part = eqxshard.fit(new_state(), train_step, make_loader(), steps=stop)
    assert int(part.step) == stop
    assert_equal(eqxshard.fit(part, train_step, make_loader(), steps=12), whole)


def test_a_finished_run_takes_no_more_steps(train_step):
    state = eqxshard.fit(new_state(), train_step, make_loader(), steps=4)
    recorder, again = Recorder(), jax.tree.map(lambda x: x, state)
    options: dict = {"epochs": 1, "trackers": [recorder]}
    again = eqxshard.fit(again, train_step, make_loader(), **options)
    assert_equal(again, state)
    assert recorder.lines == [] and recorder.closed == [None]


class Fake:
    """A step and a tracker that record when they are called."""

    def __init__(self):
        self.events = []

    def train_step(self, state, batch):
        step = int(state.step) + 1
        self.events.append(f"step {step}")
        one, none = np.ones((), np.float32), np.zeros((), np.int32)
        state = eqxshard.TrainState(jnp.asarray(step), None, None, state.key)
        return state, Metrics({"loss": one}, one, none)

    def log(self, step, values):
        self.events.append(f"log {step}")

    def close(self, error=None):
        self.events.append("close")


def test_metrics_are_read_while_the_next_step_runs(unannotated):
    fake = Fake()
    state = eqxshard.TrainState(jnp.asarray(0), None, None, jax.random.key(0))
    eqxshard.fit(
        state, fake.train_step, make_loader(), steps=6, trackers=[fake], log_every=2
    )
    assert fake.events == [
        *["step 1", "step 2", "step 3", "log 2", "step 4", "step 5", "log 4"],
        *["step 6", "log 6", "close"],
    ]


def test_trackers_and_batches_are_closed_when_something_fails(train_step):
    loader, recorder = make_loader(), Recorder()
    closed = []

    class Watched:
        def __len__(self):
            return len(loader)

        def seek(self, step):
            loader.seek(step)

        def __iter__(self):
            try:
                yield from loader
            finally:
                closed.append(True)

    def fails(model):
        raise KeyboardInterrupt

    options: dict = {"evaluate": fails, "trackers": [recorder]}
    with pytest.raises(KeyboardInterrupt) as caught:
        eqxshard.fit(new_state(), train_step, Watched(), epochs=2, **options)
    assert closed == [True] and recorder.closed == [caught.value]
    assert recorder.steps("train/loss") == [4]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_evaluations_at_any_step(train_step, placement):
    recorder, seen = Recorder(), []

    def evaluate(model):
        seen.append(float(jnp.sum(model.first.weight)))
        return {"sum": seen[-1]}

    loader = make_loader(placement=placement)
    options: dict = {"evaluate": evaluate, "trackers": [recorder], "log_every": 4}
    state = new_state()
    state = eqxshard.fit(state, train_step, loader, steps=11, evaluate_every=3, **options)
    assert recorder.steps("eval/sum") == [3, 6, 9, 11]
    assert recorder.steps("train/loss") == [3, 4, 6, 8, 9, 11]
    assert [x["eval/sum"] for _, x in recorder.lines if "eval/sum" in x] == seen
    assert seen[-1] == float(jnp.sum(state.model.first.weight)) != seen[0]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_run_compiles_each_step_once(placement, caplog):
    train_step, eval_step = (
        eqxshard.make_train_step(squared_errors, OPTIM),
        eqxshard.make_eval_step(mean_of_x),
    )
    test_loader = make_loader(placement=placement, shuffle=False)

    def evaluate(model):
        return eqxshard.evaluate(model, eval_step, test_loader)

    loader = make_loader(placement=placement)
    options: dict = {"evaluate": evaluate, "log_every": 3}
    # Chunks of a resident dataset have 1 to 3 steps.
    state = eqxshard.fit(new_state(), train_step, loader, steps=5, **options)
    eqxshard.fit(state, train_step, loader, steps=8, **options)
    assert not caplog.records


class Endless:
    """A loader without epochs."""

    def __init__(self, **options):
        self._loader = make_loader(**options)

    def seek(self, step):
        self._loader.seek(step)

    def __iter__(self):
        return iter(self._loader)


def test_a_loader_needs_no_length(train_step):
    recorder = Recorder()
    options: dict = {"trackers": [recorder], "log_every": 3, "evaluate_every": 2}
    options["evaluate"] = lambda model: {"ones": 1.0}
    state = eqxshard.fit(new_state(), train_step, Endless(), steps=5, **options)
    assert recorder.steps("train/loss") == [2, 3, 4, 5]
    assert recorder.steps("eval/ones") == [2, 4, 5]
    assert recorder.steps("epoch") == []
    assert_equal(state, eqxshard.fit(new_state(), train_step, make_loader(), steps=5))


class ClosesWithoutError:
    def log(self, step, values):
        pass

    def close(self):
        pass


ONCE: dict = {"steps": 1}
#: Options that `fit` refuses before it begins, the type of the error and its text.
MISTAKES: dict[str, tuple[dict, type[Exception], str]] = {
    "neither": ({}, ValueError, "exactly one"),
    "both": ({"steps": 1, "epochs": 1}, ValueError, "exactly one"),
    "steps": ({"steps": 0}, ValueError, "steps=0"),
    "epochs": ({"epochs": -1}, ValueError, "epochs=-1"),
    "log_every": ({**ONCE, "log_every": 0}, ValueError, "log_every=0"),
    "max_nonfinite": ({**ONCE, "max_nonfinite": 0}, ValueError, "max_nonfinite=0"),
    "evaluate_every": (
        {**ONCE, "evaluate": dict, "evaluate_every": "epohc"},
        ValueError,
        "'epohc' is not a number",
    ),
    "no epochs": ({"epochs": 2, "loader": Endless()}, ValueError, "with a length"),
    "no epochs to evaluate": (
        {**ONCE, "loader": Endless(), "evaluate": dict},
        ValueError,
        "a loader with a length",
    ),
    "hang_seconds": ({**ONCE, "hang_seconds": 0.0}, ValueError, "hang_seconds=0.0 must"),
    "list": ({**ONCE, "loader": [1, 2]}, TypeError, "a list is not a loader"),
    "function": ({**ONCE, "callbacks": [print]}, TypeError, "not a callback"),
    "every": ({**ONCE, "callbacks": [Every(0, print)]}, ValueError, r"Every\.every=0"),
    "one": ({**ONCE, "callbacks": Every(1, print)}, TypeError, "is a Every; give a list"),
    "tracker": ({**ONCE, "trackers": [print]}, TypeError, "not a tracker"),
    "one tracker": ({**ONCE, "trackers": Recorder()}, TypeError, "is a Recorder; give a"),
    "eval step": (
        {**ONCE, "evaluate": eqxshard.make_eval_step(lambda model, batch: {})},
        TypeError,
        "evaluate=EvalStep is not a function of a model; use evaluate=lambda model",
    ),
    "close": (
        {**ONCE, "trackers": [ClosesWithoutError()]},
        TypeError,
        r"close\(error=None\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_and_trackers_closed(train_step, mistake, unannotated):
    options, kind, says = MISTAKES[mistake]
    recorder = Recorder()
    given = {"loader": make_loader(), "trackers": [recorder], **options}
    with pytest.raises(kind, match=says):
        eqxshard.fit(new_state(), train_step, **given)
    # Unless it is one of the parts that cannot be called.
    assert len(recorder.closed) == (kind is ValueError and mistake != "every")


@pytest.mark.slow
def test_an_epoch_of_a_resident_dataset_is_one_dispatch_per_report(train_step, monkeypatch):
    taken = count_dispatched(monkeypatch)
    loader = make_loader(placement="device")
    eqxshard.fit(new_state(), train_step, loader, epochs=2, log_every=100)
    assert taken == [4, 4]


def test_a_loader_that_ends_too_early_is_named(train_step):
    with pytest.raises(ValueError, match="ended before step 12; take fewer steps"):
        eqxshard.fit(new_state(), train_step, make_loader(epochs=1), epochs=3)
