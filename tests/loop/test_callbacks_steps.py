import pytest
from loop_helpers import count_dispatched, fresh, make_loader

import eqxshard
from eqxshard.callbacks import Every, Profile


def fit(*callbacks, steps=6, **options):
    state, train_step = fresh()
    return eqxshard.fit(
        state, train_step, make_loader(**options), steps=steps, callbacks=callbacks
    )


def test_a_function_is_called_every_some_steps():
    seen = []
    fit(
        Every(2, lambda loop: seen.append(loop.step)),
        Every(3, lambda loop: seen.append(-3)),
    )
    assert seen == [2, -3, 4, 6, -3]


@pytest.mark.slow
@pytest.mark.parametrize("last", [4, 100])
def test_a_profile_is_written(tmp_path, last):
    fit(Profile(3, last, tmp_path))
    assert [*tmp_path.rglob("*.xplane.pb")]
    # The profiler is free again.
    fit(Profile(2, 2, tmp_path / "another"))
    assert [*(tmp_path / "another").rglob("*.xplane.pb")]


@pytest.fixture
def profiler(monkeypatch):
    """What is asked of the profiler, which records nothing."""
    calls: list[str] = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    return calls


@pytest.mark.parametrize("text, stop", [("3:5", 5), ("3:9", 6)])
def test_a_profile_is_of_its_steps(profiler, tmp_path, text, stop):
    count = Every(1, lambda loop: profiler.append(loop.step))
    fit(count, Profile.parse(text, tmp_path))
    assert profiler[: profiler.index("start")] == [1, 2]
    assert profiler[: profiler.index("stop")] == [1, 2, "start", *range(3, stop + 1)]


def test_a_profile_ends_dispatches_where_it_begins_and_ends(
    profiler, monkeypatch, tmp_path
):
    taken = count_dispatched(monkeypatch)
    fit(Profile(3, 4, tmp_path), steps=12, placement="device")
    assert taken == [2, 2, 2, 6] and profiler == ["start", "stop"]


@pytest.mark.parametrize("text", ["", "3", "3:", "a:b", "5:4", "1:3", "3:4:5"])
def test_other_texts_are_not_steps_to_profile(text, tmp_path):
    with pytest.raises(ValueError, match=rf"^'{text}' are not steps to profile; write STA"):
        Profile.parse(text, tmp_path)
