"""The view that callbacks have of a run, and their requests."""

import equinox as eqx
import pytest
from helpers import assert_equal
from loop_helpers import Recorder, fresh, make_loader

import eqxshard
from eqxshard.callbacks import Callback, Every


def fit(*callbacks, steps=6, **options):
    state, train_step = fresh()
    options = {"log_every": 4, **options}
    return eqxshard.fit(
        state, train_step, make_loader(), steps=steps, callbacks=callbacks, **options
    )


def test_a_callback_sees_the_run():
    seen = {}

    def look(loop):
        seen[loop.step] = (
            int(loop.state.step),
            len(loop.loader),
            loop.metrics.compute()["loss"],
            loop.values.get("epoch"),
        )

    recorder = Recorder()
    fit(Every(1, look), trackers=[recorder], log_every=1)
    for (step, values), (number, length, loss, last) in zip(recorder.lines, seen.values()):
        assert (number, length) == (step, 6)
        assert loss == pytest.approx(values["train/loss"])
        # The values are those of the report before.
        assert last == (None if step == 1 else (step - 1) / 6)


@pytest.mark.parametrize("saves", [True, False])
def test_stop_saves_and_returns_the_state(tmp_path, saves, capfd):
    def stop(loop):
        loop.stop("the plot is thick enough")
        loop.stop("another reason")

    checkpointer = eqxshard.Checkpointer(tmp_path) if saves else None
    recorder = Recorder()
    state = fit(Every(5, stop), steps=60, checkpointer=checkpointer, trackers=[recorder])
    assert int(state.step) == 5
    assert recorder.steps("train/loss") == [4, 5] and recorder.closed == [None]
    kept = "the checkpoint of step 5 is saved" if saves else "not saved"
    says = f"stopped after step 5: the plot is thick enough; {kept}.\n"
    assert says in capfd.readouterr().err
    assert_equal(state, fit(steps=5))
    if checkpointer is not None:
        assert checkpointer.steps() == [5]
        assert_equal(checkpointer.restore(state), state)


def test_the_main_process_prints(monkeypatch, capsys):
    fit(Every(3, lambda loop: loop.print(f"a sample\nof step {loop.step}")))
    assert capsys.readouterr().out == "a sample\nof step 3\na sample\nof step 6\n"
    monkeypatch.setattr("eqxshard.loop._loop.is_main_process", lambda: False)
    fit(Every(3, lambda loop: loop.print("again")))
    assert capsys.readouterr().out == ""


def test_save_saves_now(tmp_path):
    checkpointer = eqxshard.Checkpointer(tmp_path)
    fit(Every(5, lambda loop: loop.save()), steps=7, checkpointer=checkpointer)
    assert checkpointer.steps() == [5, 7]
    assert checkpointer.description(5)["metrics"]["train/loss"] > 0
    with pytest.raises(ValueError, match=r"loop\.save\(\) needs a checkpointer; give fit"):
        fit(Every(1, lambda loop: loop.save()))


def test_what_is_logged_joins_the_report_or_gets_a_line(tmp_path):
    class Logs(Callback):
        every = 2

        def after_step(self, loop):
            loop.log({"step": loop.step, "array": loop.state.step})

        def after_report(self, loop):
            assert loop.values["train/loss"] > 0
            loop.log({"report": loop.step})

        def after_evaluation(self, loop):
            assert loop.values["eval/ones"] == 1
            loop.log({"evaluation": loop.step})

        def after_save(self, loop):
            loop.log({"save": loop.step})

    recorder = Recorder()
    fit(
        Logs(),
        trackers=[recorder],
        evaluate=lambda model: {"ones": 1.0},
        evaluate_every=5,
        checkpointer=eqxshard.Checkpointer(tmp_path, save_every=5),
    )
    names = [
        (step, *(name for name in values if "/" not in name and name != "goodput"))
        for step, values in recorder.lines
    ]
    assert names == [
        (2, "epoch", "step", "array"),
        (4, "epoch", "step", "array", "report"),
        (5, "epoch", "evaluation", "report"),
        (5, "epoch", "save"),
        (6, "epoch", "step", "array", "evaluation", "report"),
        (6, "epoch", "save"),
    ]
    assert all(type(x) is float for x in recorder.lines[0][1].values())


def test_the_state_may_be_replaced():
    def halve(loop):
        where = lambda state: state.model.layers[0].weight  # noqa: E731
        loop.state = eqx.tree_at(where, loop.state, where(loop.state) / 2)

    by_hand, train_step = fresh()
    batches = iter(make_loader())
    for _ in range(3):
        by_hand, _ = train_step(by_hand, next(batches))
    batches.close()
    weight = by_hand.model.layers[0].weight / 2
    by_hand = eqx.tree_at(lambda s: s.model.layers[0].weight, by_hand, weight)
    by_hand = eqxshard.fit(by_hand, train_step, make_loader(), steps=5)
    assert_equal(fit(Every(3, halve), steps=5), by_hand)


def test_a_state_of_another_step_is_refused():
    def replace(loop):
        loop.state = eqx.tree_at(lambda s: s.step, loop.state, loop.state.step - 1)

    with pytest.raises(ValueError, match="is of step 1, and the run is at step 2; let"):
        fit(Every(2, replace))
