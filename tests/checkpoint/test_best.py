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
    other = eqxshard.Checkpointer(scored["max"][0], best="eval/scroe")
    with pytest.raises(FileNotFoundError, match="has a value of best='eval/scroe'; give"):
        other.restore(new_state(), step=other.best_step())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_the_best_is_kept_if_it_cannot_be_read_for_a_moment(
    tmp_path, monkeypatch, caplog, kind
):
    found = eqxshard.Checkpointer(tmp_path, max_to_keep=1, best="eval/score")

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
