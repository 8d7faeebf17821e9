import errno

import equinox as eqx
import pytest
from checkpoint_helpers import new_state
from loop_helpers import fresh, make_loader

import eqxshard
from eqxshard.checkpoint import _folder


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """For each mode, the folder of a run whose best evaluation is not its last."""

    def run(mode, sign):
        scores = iter(sign * x for x in [0.1, 0.9, 0.5, 0.9, float("nan"), 0.3])
        saved: list[int] = []

        class Recorded(eqxshard.Checkpointer):
            def save(self, state, **options):
                saved.append(int(state.step))
                super().save(state, **options)

        folder = tmp_path_factory.mktemp(mode)
        state, train_step = fresh()
        eqxshard.fit(
            state,
            train_step,
            make_loader(),
            steps=18,
            evaluate=lambda model: {"score": next(scores)},
            evaluate_every=3,
            checkpointer=Recorded(folder, max_to_keep=1, best="eval/score", mode=mode),
        )
        return folder, saved

    return {"max": run("max", 1), "min": run("min", -1)}


def checkpointer(scored, mode):
    return eqxshard.Checkpointer(scored[mode][0], best="eval/score", mode=mode)


@pytest.mark.parametrize("mode, sign", [("max", 1), ("min", -1)])
def test_the_best_of_all_evaluations_is_saved_and_kept(scored, mode, sign):
    # The first two are better than those before them; the fourth equals the second.
    assert scored[mode][1] == [3, 6, 18]
    found = checkpointer(scored, mode)
    assert found.steps() == [6, 18] and found.best_step() == 6
    assert found.description(6)["metrics"]["eval/score"] == sign * 0.9
    assert found.is_best({"eval/score": sign * 0.91})
    for value in (sign * 0.9, sign * 0.5, float("nan"), sign * float("inf")):
        assert not found.is_best({"eval/score": value})
    assert not found.is_best({}) and not found.is_best({"score": sign * 2.0})


def test_a_misspelt_metric_is_noticed_at_the_first_evaluation(scored):
    found = checkpointer(scored, "max")
    with pytest.raises(ValueError, match="best='eval/score' is not a metric of this run"):
        found.is_best({"train/loss": 1.0, "eval/scroe": 2.0})
    assert not found.is_best({"train/loss": 1.0})
    other = eqxshard.Checkpointer(scored["max"][0], best="eval/scroe", mode="max")
    with pytest.raises(FileNotFoundError, match="has a value of best='eval/scroe'; give"):
        other.restore(new_state(), step=other.best_step())


def saved(state, step):
    return eqx.tree_at(lambda s: s.step, state, state.step * 0 + step)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_first_of_equals_stays_when_all_are_saved(tmp_path, mode):
    """Each epoch ends with a save; the same holds after a resume."""
    options: dict = {"max_to_keep": 1, "best": "eval/score", "mode": mode}
    state, better = new_state(), 1.5 if mode == "max" else -1.5
    values = [float("nan"), 1.0, 1.0, 1.0, better, better, 1.0]
    for step, value in enumerate(values):
        found = eqxshard.Checkpointer(tmp_path, **options)
        assert found.is_best({"eval/score": value}) == (step in (1, 4))
        found.save(saved(state, step), metrics={"eval/score": value})
        found.close()
        best = 4 if step >= 4 else 1 if step else None
        assert found.best_step() == best
        assert found.steps() == sorted({step, best or step})


@pytest.mark.parametrize(
    "best, mode, values",
    [
        ("eval/loss", None, [0.5, 0.4, 0.3]),
        ("eval/token_error", None, [0.5, 0.4, 0.3]),
        ("eval/accuracy", None, [0.3, 0.4, 0.5]),
        ("eval/loss", "max", [0.3, 0.4, 0.5]),
        ("eval/accuracy", "min", [0.5, 0.4, 0.3]),
    ],
)
def test_the_best_is_the_same_for_all_who_look_for_it(tmp_path, best, mode, values):
    name = best.removeprefix("eval/")
    for order, last, wanted in ((values, 6, 6), (values[::-1], 4, 2)):
        state, train_step = fresh()
        results = iter(order)
        folder = tmp_path / str(last)
        found = eqxshard.Checkpointer(folder, max_to_keep=1, best=best, mode=mode)
        state = eqxshard.fit(
            state,
            train_step,
            make_loader(),
            steps=6,
            evaluate=lambda model: {name: next(results)},  # noqa: B023
            evaluate_every=2,
            checkpointer=found,
            callbacks=[eqxshard.callbacks.EarlyStopping(best, 1, mode=mode)],
        )
        assert int(state.step) == last and found.best_step() == wanted


@pytest.mark.parametrize(
    "best, says",
    [
        ("eval/score", r"eval/score leaves open .*; say mode='min' or mode='max'"),
        ("eval/lossless_rate", "; say mode="),
        ("eval/los", "; did you mean 'eval/loss'[?] Otherwise say mode="),
    ],
)
def test_a_mode_that_the_name_leaves_in_doubt_has_to_be_said(tmp_path, best, says):
    with pytest.raises(ValueError, match=says):
        eqxshard.Checkpointer(tmp_path, best=best)
    with pytest.raises(ValueError, match=says):
        eqxshard.callbacks.EarlyStopping(best, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_the_best_is_kept_if_it_cannot_be_read_for_a_moment(
    tmp_path, monkeypatch, caplog, kind
):
    found = eqxshard.Checkpointer(tmp_path, max_to_keep=1, best="eval/score", mode="max")

    def save(step, score):
        state = new_state()
        state = eqx.tree_at(lambda s: s.step, state, state.step + step)
        found.save(state, metrics={"eval/score": score})
        found.wait()

    save(1, 0.9)
    save(2, 0.1)
    read = _folder.read_bytes

    def fails(path):
        if path.parent.name == "1":
            raise kind(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(_folder, "read_bytes", fails)
        save(3, 0.2)
        assert found.is_best({"eval/score": 0.3})
    assert "old checkpoints could not be removed: " in caplog.text
    assert found.steps() == [1, 2, 3] and found.best_step() == 1
    save(4, 0.1)
    assert found.steps() == [1, 4]
